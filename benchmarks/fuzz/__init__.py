"""Inputs that nobody meant: only a ``Mistake`` may come of them."""
