"""LLM-Streamline: settings and message contracts."""
