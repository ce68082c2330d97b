"""Comparison of estimates with measured runs."""
