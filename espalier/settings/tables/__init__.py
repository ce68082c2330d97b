"""Tables of a run's settings that several methods read."""
