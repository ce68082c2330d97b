"""Comparison of the tuning methods on one task with equal steps, as complete runs of the app."""
