"""Results of runs: how they are stored, sent and merged into a model."""
