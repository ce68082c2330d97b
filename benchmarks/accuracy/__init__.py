"""Measurements of accuracy: rounding, and agreement with other programs."""
