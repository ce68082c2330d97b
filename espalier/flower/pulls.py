"""Shorter waits of Flower for parts of a message that are still being sent.

A receiver learns of a message before all its objects have arrived at the SuperLink or SuperNode,
and asks for each object until it is there. Flower waits 1 s after the first attempt in vain, then
2 s, up to 10 s, which is most of the time that a small message takes. The waits are defaults of two
functions of Flower, which are private to it.
"""

from flwr.supercore.inflatable import inflatable_utils

FIRST_SECONDS = 0.05
"""Seconds between the first and the second attempt to pull an object; each wait doubles."""
LONGEST_SECONDS = 1.0
"""Maximum seconds between two attempts."""


def ask_again_soon() -> None:
    """Set the waits for this process.

    The number of attempts is no longer limited, as the attempts are closer together. What a dead
    sender left incomplete still ends after three minutes, when its push session expires at the
    SuperLink, and every message after Flower's two hours.
    """
    for function in (
        inflatable_utils.pull_objects,
        inflatable_utils.pull_and_inflate_object_from_tree,
    ):
        # Defaults of keyword arguments, which exist once per process.
        function.__kwdefaults__.update(
            initial_backoff=FIRST_SECONDS, backoff_cap=LONGEST_SECONDS, max_tries_per_object=None
        )
