"""Studies of FedSpaLLM: the tables of its paper and open questions, on your own model."""
