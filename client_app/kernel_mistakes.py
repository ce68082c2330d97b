"""What kernels refuse is told in their own words: they quote no data."""

from collections.abc import Iterator
from contextlib import contextmanager

from espalier.settings.mistakes import Mistake
from pruning_kernels.scores import NotFiniteError
from pruning_kernels.sparsegpt import NoFactorError


@contextmanager
def mistakes_of_kernels() -> Iterator[None]:
    """Let a kernel's refusal be the client's."""
    try:
        yield
    except (NotFiniteError, NoFactorError) as error:
        raise Mistake(str(error)) from error
