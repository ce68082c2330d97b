"""Text of ``config.json``; transformers' configuration object interprets it and adds defaults."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from espalier.environment.bounded_json import read_json_object
from espalier.errors import INTERRUPTS, EspalierError, InputError

CONFIG = "config.json"
OF_THE_HUB = ", or one of the hub as OWNER/NAME or OWNER/NAME@REVISION"
LONGEST_REASON = 300
"""Maximum number of characters that are shown of a library's error message."""


def read_config(path: Path) -> dict[str, Any]:
    """Return the keys and values of a ``config.json``; InputError if it is missing or damaged."""
    if not path.parent.exists():
        raise InputError(
            f"{path.parent}: there is no such directory; name that of a Hugging Face model"
            f"{OF_THE_HUB if {'@', ':'} & set(str(path.parent)) else ''}"
        )
    if not path.exists():
        raise InputError(
            f"{path.parent}: has no {path.name}; name the directory of a Hugging Face model"
        )
    return read_json_object(path)


@contextmanager
def explained(where: str) -> Iterator[None]:
    """Turn exceptions of transformers about a configuration into an InputError with the reason."""
    try:
        yield
    except (EspalierError, *INTERRUPTS):
        raise
    # A panic in a Rust library is not an Exception.
    except BaseException as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:LONGEST_REASON]}"
        raise InputError(f"{where}: transformers cannot build this model: {reason}") from error
