"""Work of clients in private runs."""
