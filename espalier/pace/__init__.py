"""Progress of long work: reported by the code that does it, received by listeners."""
