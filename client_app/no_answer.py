"""Why a node gives no answer this time: what it raises then goes to the server as one of Flower's errors, in its own words.

Covers: the words are ours and hold nothing of the site's data; of any other error the warm node tells the type alone. What an
answer would hold is the contracts' matter; a Flower error has no content.
Does not cover: Flower's own node, which sends the text of an error that comes from outside the ClientApp's handlers.
"""


class NoAnswerError(RuntimeError):
    """The message is not answered; the text may be told."""
