"""Matrices in NF4, in memory and in files."""
