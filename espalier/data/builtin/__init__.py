"""Built-in texts, which every Python installation has."""
