"""Evaluation of models: perplexity on text and scores on tasks."""
