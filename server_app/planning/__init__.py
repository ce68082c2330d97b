"""What a run will take, from its settings and the model's configuration alone."""
