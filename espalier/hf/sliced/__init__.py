"""Models with a rotated and narrower residual stream (SliceGPT)."""
