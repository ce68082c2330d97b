"""Summands: a client's reply as integers, of which a server may learn only the sum."""
