"""Fleets of simulated devices for tests and experiments."""
