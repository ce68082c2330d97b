"""FedPrLLM: clients vote on the weights to prune."""
