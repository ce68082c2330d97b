"""SliceGPT: settings and message contracts."""
