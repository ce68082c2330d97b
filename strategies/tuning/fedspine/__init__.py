"""FedSpine: devices alternate pruning and tuning, by a ratio and a rank of their own."""
