"""Tokenizer of a model directory, and error messages for one that cannot be loaded.

transformers reports little about missing or damaged files. If it finds no vocabulary, it may build
a tokenizer that encodes every text as an empty sequence.
"""

import json
from collections.abc import Iterator
from functools import lru_cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from espalier.environment.bounded_json import UnboundedJsonError, read_json
from espalier.environment.imports import importing
from espalier.errors import INTERRUPTS, EspalierError, InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SETTINGS_FILE = "tokenizer_config.json"
JSON_FILES = (
    "tokenizer.json",
    SETTINGS_FILE,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "tekken.json",
)
PAIR = ("vocab.json", "merges.txt")
"""Files that need each other if there is no tokenizer.json."""
VOCABULARIES = (
    "tokenizer.json",
    "*.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tekken.json",
    "*.tiktoken",
)
"""Name patterns of files that hold a vocabulary."""
LARGE_FILE_POINTER = b"version https://git-lfs"
MAX_OF_A_REASON = 200
"""Maximum number of characters that are shown of a library's error message."""


@lru_cache(maxsize=4)
def load_tokenizer(directory: Path, stamps: object) -> "PreTrainedTokenizerBase":
    """Return the tokenizer of a directory.

    Parameters
    ----------
    directory : model directory
    stamps : state of its files; part of the cache key, so that changed files are loaded again

    Raises
    ------
    InputError
        The tokenizer cannot be loaded. The message names the file and the reason.
    """
    try:
        with importing():
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(
                directory, local_files_only=True, trust_remote_code=False
            )
    except INTERRUPTS:
        raise
    # A panic in Rust, as in the tokenizers library, is not an Exception.
    except BaseException as error:
        raise _refused(directory, _reason(directory, error)) from error
    # transformers may return a tokenizer without any vocabulary instead of failing.
    own = {name for name in tokenizer.vocab_files_names.values() if isinstance(name, str)}
    if (
        own
        and not any(_holding_vocabularies(directory))
        and not any((directory / name).exists() for name in own)
    ):
        raise _refused(directory, _nothing_there())
    return tokenizer


def _refused(directory: Path, reason: str) -> EspalierError:
    return InputError(f"{directory}: the tokenizer cannot be loaded: {reason}")


def _reason(directory: Path, error: BaseException) -> str:
    """Return why loading failed: a damaged file if one is found, else the library's error."""
    # A damaged file explains more than the message of the library.
    damaged = next(_damages(directory), "")
    if damaged:
        return f"{damaged}; copy the file again from where the model came from"
    found = {path.name for path in _holding_vocabularies(directory)}
    if own_code := _own_code(directory, error):
        return (
            f"{SETTINGS_FILE} names the tokenizer's own code ({own_code}), which is not"
            " executed; use a model with a tokenizer class of transformers, or save this"
            " tokenizer as tokenizer.json and remove auto_map"
        )
    if not found:
        return _nothing_there()
    if "tokenizer.json" not in found and len(lacking := set(PAIR) - found) == 1:
        (there,) = set(PAIR) - lacking
        return f"{there} exists without {lacking.pop()}; copy both from where the model came from"
    return _reason_of_library(directory, found, error)


def _nothing_there() -> str:
    return (
        f"no file with a vocabulary exists ({', '.join(VOCABULARIES)}); copy the tokenizer's"
        " files from where the model came from, or write them with the tokenizer's"
        " save_pretrained"
    )


def _reason_of_library(directory: Path, found: set[str], error: BaseException) -> str:
    reason = _first_line(error)
    if "tokenizer.json" in found:
        if broken := _broken(directory / "tokenizer.json"):
            return (
                "tokenizer.json is damaged, or was written by a newer version of the library"
                f" tokenizers than {version('tokenizers')} ({broken}); copy it again, or install"
                " the version that wrote it"
            )
        return (
            f"a value in {SETTINGS_FILE} does not fit tokenizer.json ({reason}); copy both from where"
            " the model came from"
        )
    vocabulary = ", ".join(sorted(found))
    sentencepiece = any(name.endswith(".model") for name in found)
    if isinstance(error, ImportError) or (sentencepiece and find_spec("sentencepiece") is None):
        return (
            f"reading {vocabulary} needs the library sentencepiece or tiktoken, which is not"
            f" installed ({reason}); install it, or write a tokenizer.json with the tokenizer's"
            " save_pretrained on a machine that has it"
        )
    return (
        f"{vocabulary} cannot be read ({reason}); copy the tokenizer's files again from where the"
        " model came from"
    )


def _broken(path: Path) -> str:
    """Return why the tokenizers library cannot read a file; an empty string if it can."""
    from tokenizers import Tokenizer

    try:
        Tokenizer.from_file(str(path))
    except INTERRUPTS:
        raise
    except BaseException as error:
        return _first_line(error)
    return ""


def _first_line(error: BaseException) -> str:
    reason = (str(error).strip().splitlines() or [""])[0][:MAX_OF_A_REASON]
    return f"{type(error).__name__}: {reason}" if reason else type(error).__name__


def _holding_vocabularies(directory: Path) -> Iterator[Path]:
    return (path for pattern in VOCABULARIES for path in directory.glob(pattern) if path.is_file())


def _own_code(directory: Path, error: BaseException) -> str:
    """Return the tokenizer class that needs remote code, if that is why transformers refused.

    Returns an empty string for other errors.
    """
    try:
        named: Any = read_json((directory / SETTINGS_FILE).read_bytes()).get("auto_map") or {}
    except (OSError, ValueError, AttributeError):
        return ""
    # transformers names this option in its message if it refuses remote code.
    if "trust_remote_code" not in str(error):
        return ""
    classes = named.get("AutoTokenizer") if isinstance(named, dict) else named
    classes = classes if isinstance(classes, list) else [classes]
    return ", ".join(str(name)[:MAX_OF_A_REASON] for name in classes if name) or "auto_map"


def _damages(directory: Path) -> Iterator[str]:
    """Yield a sentence for each tokenizer file whose content does not match its name."""
    names = {
        *JSON_FILES,
        *PAIR,
        *(path.name for pattern in VOCABULARIES for path in directory.glob(pattern)),
    }
    for path in sorted(directory / name for name in names):
        if path.is_symlink() and not path.exists():
            yield f"{path.name} is a link to a missing file"
        elif path.exists() and (damage := _damage(path)):
            yield f"{path.name} {damage}"


def _damage(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if not data.strip():
        return "is empty"
    if data.startswith(LARGE_FILE_POINTER):
        return "is a Git LFS pointer instead of the file (git lfs pull fetches the file)"
    return _json_damage(data) if path.suffix == ".json" else ""


def _json_damage(data: bytes) -> str:
    try:
        document = read_json(data.decode())
    except UnicodeDecodeError as error:
        return f"is not UTF-8 (byte {error.start})"
    except json.JSONDecodeError as error:
        ends = (
            "ends too early, or "
            if error.pos >= len(error.doc.rstrip()) or error.msg.startswith("Unterminated")
            else ""
        )
        return f"{ends}is not JSON (line {error.lineno}, column {error.colno}: {error.msg})"
    except UnboundedJsonError as error:
        return f"cannot be read as JSON ({error})"
    except (ValueError, RecursionError) as error:
        return f"cannot be read as JSON ({type(error).__name__})"
    return "" if isinstance(document, dict) else "contains no JSON object"
