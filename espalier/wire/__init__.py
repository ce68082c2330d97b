"""What crosses the network: the only room that knows how a payload is laid out, and what each message may hold."""
