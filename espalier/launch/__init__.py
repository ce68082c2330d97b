"""Runs, and the processes that they start."""
