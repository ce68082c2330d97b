"""SliceGPT: the residual stream is rotated and sliced by pooled second moments."""
