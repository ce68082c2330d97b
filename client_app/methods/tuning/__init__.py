"""Client's work of the methods that train adapters."""
