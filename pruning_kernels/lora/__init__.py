"""LoRA updates as factors: means, ranks, importance, clipping and NF4."""
