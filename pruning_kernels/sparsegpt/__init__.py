"""SparseGPT: pruning with reconstruction."""
