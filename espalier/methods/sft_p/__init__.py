"""SFT-P: settings and message contracts."""
