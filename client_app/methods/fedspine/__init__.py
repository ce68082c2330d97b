"""FedSpine at a device: its cut, its training and the importance of its groups."""
