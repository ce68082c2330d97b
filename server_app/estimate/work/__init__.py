"""Memory, disk space and operations of a run before it starts."""
