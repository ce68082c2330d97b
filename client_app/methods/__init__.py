"""Local work of each method at a client."""
