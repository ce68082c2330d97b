"""Flower strategies: one module or folder per method, and what they share."""
