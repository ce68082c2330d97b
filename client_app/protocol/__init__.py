"""Answers of a client to each kind of message, and the client state between them."""
