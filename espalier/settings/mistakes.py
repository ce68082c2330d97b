"""The error that a user or a site can mend."""


class Mistake(ValueError):
    """Something a person can put right: it names the key or file, the value and the remedy.

    Its text may leave a client in an error reply, so it never quotes a line of data.
    """
