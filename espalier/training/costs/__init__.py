"""Costs of training: parameters, bytes and memory."""
