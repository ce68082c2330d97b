"""Settings of a run and of a node, and the registry of methods."""
