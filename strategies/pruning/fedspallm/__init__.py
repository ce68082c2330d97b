"""FedSpaLLM: clients prune sampled layers, the server averages the kept weights."""
