"""The methods, each a strategy that reads like its paper."""
