"""Figures of a run for tracking tools, written by the server."""
