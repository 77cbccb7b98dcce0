"""The coordinator: plans, deploys and drives a training run."""
