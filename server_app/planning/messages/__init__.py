"""Which messages a run has, method by method."""
