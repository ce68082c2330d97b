"""Error of a node that does not answer a message; its text is sent as one of Flower's errors.

Covers: the text is ours and contains no data of the site. For any other error, the warm node sends
only the type. Contracts limit the content of answers; a Flower error has none.

Does not cover: Flower's own node, which sends the text of errors raised outside the ClientApp's
handlers.
"""


class NoAnswerError(RuntimeError):
    """Error for a message that is not answered; its text may be sent to the server."""
