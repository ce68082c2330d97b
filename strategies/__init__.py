"""One file per method; each is an ordinary Flower strategy with ``start``."""
