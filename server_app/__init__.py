"""The server of a run: settings to strategy to results."""
