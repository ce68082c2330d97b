"""Lifetime of messages in Flower, from which a client derives the deadline of its reply."""

REQUESTS_AHEAD = 2
"""Number of requests that a client has at a time if its reply is sent in parts.

A SuperNode that finds no message sleeps for three seconds (`flower-supernode`). With two requests
the next one is available when the reply to the first is sent. The SuperLink also never stores more
than two replies.
"""
MARGIN = 60.0
"""Seconds after the deadline of a reply before Flower may delete the message."""


def lifetime(seconds: float) -> float:
    """Return the lifetime in seconds of a message whose reply may take ``seconds``.

    It includes the time for the reply to the request before it.
    """
    return REQUESTS_AHEAD * seconds + MARGIN


def seconds_of(lifetime: float) -> float:
    """Return the maximum duration in seconds of the reply to a message with this lifetime."""
    return max(0.0, lifetime - MARGIN) / REQUESTS_AHEAD
