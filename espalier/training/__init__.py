"""The local training loop, the same for every method that tunes, at a client and at the server."""
