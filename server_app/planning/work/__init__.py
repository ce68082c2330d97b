"""Memory and operations of each method's processes."""
