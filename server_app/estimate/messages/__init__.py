"""Messages of a run before it starts, by a dry run of its strategy."""
