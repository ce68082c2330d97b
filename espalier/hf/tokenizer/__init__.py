"""Tokenizers, and downloaded models whose tokenizer runs in a separate process."""
