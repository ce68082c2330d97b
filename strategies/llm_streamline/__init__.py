"""LLM-Streamline: a stretch of blocks is replaced by one trained layer."""
