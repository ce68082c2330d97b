"""Run and rounds of every method: messages, clients, checkpoint and progress."""
