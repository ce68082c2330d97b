"""Settings, tensors and contracts of all methods that average LoRA adapters."""
