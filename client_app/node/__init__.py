"""Warm node, and checks of a node before a run."""
