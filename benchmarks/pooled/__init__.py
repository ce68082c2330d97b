"""Pooled pruning: masks bit by bit, and quality next to the other methods."""
