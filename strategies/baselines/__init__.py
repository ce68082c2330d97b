"""Centralized baselines of the papers, on the pooled data of all clients."""
