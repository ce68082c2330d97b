"""Membership tests: recognise a known window of text in one reply of a client."""
