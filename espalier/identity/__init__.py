"""Identity of programs, runs and sites."""
