"""Memory and computation of a run, for its estimate."""
