"""FedPETuning, and shared parts of all methods that average LoRA adapters: settings and message contracts."""
