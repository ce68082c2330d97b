"""FedSpaLLM: settings and message contracts."""
