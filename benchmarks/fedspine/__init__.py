"""Studies of FedSpine: what its bandit regrets on rewards that are known."""
