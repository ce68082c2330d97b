"""FedSODA: LoRA on a pruned and quantised sub-model that the server keeps aligned."""
