"""Models whose residual stream is rotated and narrower (SliceGPT): how they are made of a base, opened and written."""
