"""Messages of a run, by method."""
