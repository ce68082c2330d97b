"""Scores of weights, and selection of the weights to prune."""
