"""Differential privacy: quality at several epsilon; secure sums: time of whole runs."""
