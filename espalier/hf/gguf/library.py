"""The library ``gguf``, which is an extra."""

from importlib.util import find_spec

from espalier.errors import InputError


def require_gguf(to: str = "gguf") -> None:
    """Raise InputError, which names the target ``to``, if the library ``gguf`` is not installed."""
    if find_spec("gguf") is None:
        raise InputError(
            f"--to {to}: the library gguf is not installed on this machine; install the extra"
            " (pip install -c constraints.txt -e '.[gguf]')"
        )
