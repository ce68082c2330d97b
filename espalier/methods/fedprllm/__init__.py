"""FedPrLLM: settings and message contracts."""
