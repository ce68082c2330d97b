"""Handling of results: a file per kind of result, which writes, evaluates and compares it."""
