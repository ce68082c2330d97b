"""Server side of a run: settings, strategy, results."""
