"""HetLoRA: settings and message contracts."""
