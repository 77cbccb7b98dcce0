"""The order of forwards, backwards and transfers, as values."""
