"""LLM-Pruner: settings and message contracts."""
