"""Measurements of memory."""
