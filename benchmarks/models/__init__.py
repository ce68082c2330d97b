"""Models of the measurements: with random weights, and published ones by their configuration."""
