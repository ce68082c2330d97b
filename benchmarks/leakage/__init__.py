"""Measurement of what replies tell about a client's text."""
