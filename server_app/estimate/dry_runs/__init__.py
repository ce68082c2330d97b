"""Strategies whose clients answer from contracts, for the estimate of a run's messages."""
