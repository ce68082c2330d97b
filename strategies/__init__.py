"""Flower strategies: one file per method, and the engine that they share."""
