"""Messages between server and clients: their layout, and the contracts that limit their content.

Only this package knows how a payload is laid out and what each kind of message may hold.
"""
