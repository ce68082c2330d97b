"""Client's work of the methods that prune without training."""
