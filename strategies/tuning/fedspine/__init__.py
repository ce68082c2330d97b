"""FedSpine: devices prune and tune in turn, by a ratio and a rank of their own."""
