"""What one reply tells of a window of text that the server knows."""
