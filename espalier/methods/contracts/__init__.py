"""Message contracts of each method."""
