"""Settings of a run and of a node, derived seeds, and the error for invalid settings."""
