"""Methods whose clients train adapters, some of which prune too."""
