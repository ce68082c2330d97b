"""Settings of a run and of a node, derived seeds, and the error that names a mistake in them."""
