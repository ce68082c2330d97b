"""FLAP: settings and message contracts."""
