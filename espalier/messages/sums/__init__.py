"""Messages and sizes of secure sums."""
