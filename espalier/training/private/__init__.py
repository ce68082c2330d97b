"""Training with differential privacy."""
