"""Local training: one loop for all tuning methods, at a client and at the server."""
