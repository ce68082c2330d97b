"""Errors of kernels, which contain no data, as errors whose text may leave a client."""

from collections.abc import Iterator
from contextlib import contextmanager

from espalier.errors import InputError


@contextmanager
def kernel_errors() -> Iterator[None]:
    """Convert the errors of kernels into InputError, with the same message."""
    # ``fetch`` and ``push`` use this module and do not need torch.
    from pruning_kernels.selection.scores import NotFiniteError
    from pruning_kernels.sparsegpt import NoFactorError

    try:
        yield
    except (NotFiniteError, NoFactorError) as error:
        raise InputError(str(error)) from error
