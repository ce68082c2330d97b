"""Studies of SFT-P: variants against other methods, budgets, agreement, and the paper's figures."""
