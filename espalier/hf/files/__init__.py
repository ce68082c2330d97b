"""Tensors in safetensors files."""
