"""Differential privacy: quality at several epsilon."""
