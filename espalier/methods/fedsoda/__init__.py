"""FedSODA: settings and message contracts."""
