"""The tables of the FedSpaLLM paper, and what it leaves open, measured with a model and texts of one's own."""
