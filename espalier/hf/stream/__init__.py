"""Computation block by block, with one block of weights in memory."""
