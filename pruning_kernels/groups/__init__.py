"""Prunable groups: scores, budgets, gates and mask tuning."""
