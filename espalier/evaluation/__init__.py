"""How good a model is: perplexity on public text."""
