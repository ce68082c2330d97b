"""The error that a user or a site can mend."""

FLOWER_REPORTS_IT_TOO = "(Flower's own report of it follows)"
"""The ServerApp prints this line after it has said why a run failed; the traceback that follows says nothing more."""


class Mistake(ValueError):
    """Something a person can put right: it names the key or file, the value and the remedy.

    Its text may leave a client in an error reply, so it never quotes a line of data.
    """
