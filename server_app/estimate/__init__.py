"""Estimate of the bytes, memory, disk space and time of a run."""
