"""Studies of FedSpine: regret of its bandit, cost of a step, and scores on tasks."""
