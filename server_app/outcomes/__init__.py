"""What becomes of a result: what is written of it, measured and compared; a file per kind of result."""
