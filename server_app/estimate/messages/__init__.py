"""Messages of a run, for its estimate."""
