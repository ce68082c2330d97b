"""Studies of SFT-P: variants against methods that make one smaller model for all, budgets, agreement; the paper's figures."""
