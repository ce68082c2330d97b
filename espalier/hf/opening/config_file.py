"""Text of ``config.json``; transformers' configuration object interprets it and adds defaults."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from espalier.environment.bounded_json import read_json
from espalier.errors import INTERRUPTS, EspalierError, InputError

CONFIG = "config.json"
LONGEST_REASON = 300
"""Maximum number of characters that are shown of a library's error message."""


def read_config(path: Path) -> dict[str, Any]:
    """Return the keys and values of a ``config.json``.

    Raises
    ------
    InputError
        The file does not exist, cannot be read, or is not a JSON object. The message names the
        reason.
    """
    try:
        document = read_json(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(
            f"{path.parent}: has no {path.name}; name the directory of a Hugging Face model"
        ) from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{path}: is not a JSON file: {first_line(error)}; correct it, or copy it again"
        ) from None
    if not isinstance(document, dict):
        raise InputError(
            f"{path}: contains a JSON {type(document).__name__} instead of keys and values; copy"
            " it again"
        )
    return document


@contextmanager
def explained(where: str) -> Iterator[None]:
    """Turn exceptions of transformers about a configuration into a InputError with file and reason."""
    try:
        yield
    except (EspalierError, *INTERRUPTS):
        raise
    # A panic in a Rust library is not an Exception.
    except BaseException as error:
        why = f"{type(error).__name__}: {first_line(error)}"
        raise InputError(f"{where}: transformers cannot build this model: {why}") from error


def first_line(error: BaseException) -> str:
    """Return the message of an exception on one line of limited length."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= LONGEST_REASON else text[:LONGEST_REASON] + " ..."
