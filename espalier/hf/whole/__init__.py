"""Whole models in memory for training."""
