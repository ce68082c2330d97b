"""Readers of text and JSON Lines files."""
