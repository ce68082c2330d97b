"""What rounds lead to, as it is kept, sent and written."""
