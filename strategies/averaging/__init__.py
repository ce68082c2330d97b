"""Weights and limits of the clients in an average."""
