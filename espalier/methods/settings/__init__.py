"""Settings of each method."""
