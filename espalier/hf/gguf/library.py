"""The library ``gguf``, which is an extra."""

from importlib.util import find_spec

from espalier.errors import InputError


def require_gguf() -> None:
    """Raise InputError if the library ``gguf`` is not installed."""
    if find_spec("gguf") is None:
        raise InputError(
            "--to gguf: the library gguf is not installed on this machine; install the extra"
            " (pip install 'espalier[gguf]')"
        )
