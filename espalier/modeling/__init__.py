"""Hugging Face models: opening, block-by-block forward passes, local pruning and export."""
