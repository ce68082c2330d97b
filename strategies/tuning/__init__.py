"""Strategies of the methods whose clients train adapters."""
