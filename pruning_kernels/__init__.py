"""Pruning mathematics on arrays, without Flower, Hugging Face or files.

Weights are ``(out_features, in_features)`` as in ``torch.nn.Linear``. A *prune mask* is True for
removed weights. A packed mask has one bit per weight in row-major order, little-endian in 64-bit
words (``bitmask``).
"""
