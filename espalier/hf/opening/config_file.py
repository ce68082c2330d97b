"""The text of ``config.json``; what its values mean, and what it leaves out, says transformers' own object."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from espalier.environment.bounded_json import read_json
from espalier.errors import INTERRUPTS, Mistake

CONFIG = "config.json"
LONGEST_REASON = 300
"""Characters of what a library says that are shown."""


def read_config(path: Path) -> dict[str, Any]:
    """Return the keys and values of a ``config.json``.

    Raises
    ------
    Mistake
        There is no such file, it cannot be read, or it is no JSON object; the reason is named.
    """
    try:
        document = read_json(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise Mistake(
            f"{path.parent}: has no {path.name}; name the directory of a Hugging Face model"
        ) from None
    except OSError as error:
        raise Mistake(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise Mistake(
            f"{path}: is no JSON file: {first_line(error)}; mend it, or copy it again"
        ) from None
    if not isinstance(document, dict):
        raise Mistake(
            f"{path}: holds a JSON {type(document).__name__} in place of keys and values; copy it"
            " again"
        )
    return document


@contextmanager
def explained(where: str) -> Iterator[None]:
    """Turn what transformers raises of a configuration into a Mistake that names the file and the reason."""
    try:
        yield
    except (Mistake, *INTERRUPTS):
        raise
    except BaseException as error:  # a panic of a library in Rust is no Exception
        why = f"{type(error).__name__}: {first_line(error)}"
        raise Mistake(f"{where}: transformers cannot build this model: {why}") from error


def first_line(error: BaseException) -> str:
    """Return what an exception says, on one line of a bounded length."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= LONGEST_REASON else text[:LONGEST_REASON] + " ..."
