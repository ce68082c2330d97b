"""Memory, speed and device of the machine."""
