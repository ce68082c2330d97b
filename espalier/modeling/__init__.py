"""Hugging Face models: how they are opened, walked block by block, pruned by one party, and written again."""
