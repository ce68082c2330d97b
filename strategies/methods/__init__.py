"""Federated methods; each file is one strategy and follows the steps of its paper."""
