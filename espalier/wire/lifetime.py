"""For how long Flower keeps a message: from it a client reads how long the server waits for the answer."""

REQUESTS_AHEAD = 2
"""Requests that one client has at a time where its reply comes in parts. A SuperNode that finds no message when it looks sleeps
for three seconds (`flower-supernode`), so the next one lies there before the last is answered; of replies, too, the SuperLink
never holds more than these."""
MARGIN = 60.0
"""Seconds beyond the deadline after which Flower may forget a message."""


def lifetime(seconds: float) -> float:
    """Seconds for which Flower keeps a message whose answer may take so long, and may wait for that of the one before it."""
    return REQUESTS_AHEAD * seconds + MARGIN


def seconds_of(lifetime: float) -> float:
    """How long the answer to a message with this lifetime may take."""
    return max(0.0, lifetime - MARGIN) / REQUESTS_AHEAD
