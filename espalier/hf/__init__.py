"""Hugging Face models: how they are opened, streamed block by block, edited and written."""
