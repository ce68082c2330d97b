"""FedPETuning: federated averaging of LoRA adapters."""
