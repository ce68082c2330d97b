"""Strategies that remove prunable groups of one global model."""
