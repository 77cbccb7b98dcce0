"""What a device runs: engines, estimators, optimizers and the stage worker."""
