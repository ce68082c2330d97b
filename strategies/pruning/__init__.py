"""Strategies of the methods that prune without training at the clients."""
