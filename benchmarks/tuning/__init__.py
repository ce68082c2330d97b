"""Studies of the tuning methods, measured on your own models and data."""
