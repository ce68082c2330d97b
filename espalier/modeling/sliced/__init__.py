"""SliceGPT models, whose residual stream is rotated and narrower: creation, opening and export."""
