"""Optimizers on one flat buffer."""
