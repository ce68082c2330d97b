"""Membership tests: recognition of a known text sample in one reply of a client."""
