"""Fuzzing: random and mutated inputs may only lead to a ``InputError``."""
