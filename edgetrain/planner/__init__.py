"""Which device runs which layers."""
