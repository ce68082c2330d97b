"""Errors of a client: those of kernels, which contain no data, and those that leave it as text.

Covers: the text is ours and contains no data of the site. For any other error, the warm node sends
only the type. Contracts limit the content of answers; a Flower error has none.

Does not cover: Flower's own node, which sends the text of errors raised outside the ClientApp's
handlers.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from espalier.errors import InputError


@contextmanager
def mistakes_of_kernels() -> Iterator[None]:
    """Convert the errors of kernels into InputError, with the same message."""
    # ``fetch`` and ``deliver`` use this module and do not need torch.
    from pruning_kernels.selection.scores import NotFiniteError
    from pruning_kernels.sparsegpt import NoFactorError

    try:
        yield
    except (NotFiniteError, NoFactorError) as error:
        raise InputError(str(error)) from error


class NoAnswerError(RuntimeError):
    """Error for a message that is not answered; its text may be sent to the server."""
