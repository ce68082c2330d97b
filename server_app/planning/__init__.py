"""Estimate of a run's resources, from its settings and the model's configuration only."""
