"""Summands of clients: modular integers made of the plain reply of a method."""
