"""Summary, table and model card of a run."""
