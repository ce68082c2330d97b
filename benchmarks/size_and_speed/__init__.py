"""Size, memory, speed and quality of results of runs, relative to their dense model."""
