"""Pruning mathematics on arrays: no Flower, no Hugging Face, no files.

Weights are ``(out_features, in_features)`` as in ``torch.nn.Linear``. A *prune mask* is True where a weight is removed;
packed, it is one bit per weight in row-major order, little-endian in 64-bit words (``bitmask``).
"""
