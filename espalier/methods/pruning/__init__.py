"""Methods that prune without training at the clients."""
