"""Tensors of a message as blobs."""
