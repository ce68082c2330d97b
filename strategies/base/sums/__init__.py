"""Secure sums at the server: exchanges with the clients, and unmasking."""
