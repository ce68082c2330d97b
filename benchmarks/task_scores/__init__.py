"""Scores of smaller models on public tasks."""
