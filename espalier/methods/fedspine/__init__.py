"""FedSpine: settings and message contracts."""
