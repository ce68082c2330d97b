"""Models whose shape is not their base's: blocks dropped, attention groups, channels and residual lanes cut."""
