"""What every method is built on: the life of a run, rounds of messages, who takes part, what is on disk."""
