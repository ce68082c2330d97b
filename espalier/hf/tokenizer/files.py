"""Tokenizer of a model directory, and error messages for one that cannot be loaded.

transformers reports little about missing or damaged files. If it finds no vocabulary, it may build
a tokenizer that encodes every text as an empty sequence.
"""

from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from espalier.environment.bounded_json import read_json_object
from espalier.environment.imports import importing
from espalier.errors import INTERRUPTS, EspalierError, InputError
from espalier.hf.families import PER_LAYER, SLICED, STRUCTURED
from espalier.hf.files.unchanged_files import cached_while_unchanged
from espalier.hf.opening.config_file import CONFIG

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SETTINGS_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
OTHER_FILES = (SETTINGS_FILE, "special_tokens_map.json", "added_tokens.json")
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
PAIR = {"vocab.json", "merges.txt"}
"""Files that need each other if there is no tokenizer.json."""
LARGE_FILE_POINTER = b"version https://git-lfs"
MAX_OF_A_REASON = 200
"""Maximum number of characters that are shown of a library's error message."""
COPY = "copy it again from where the model came from"


@cached_while_unchanged(4)
def load_tokenizer(directory: Path) -> "PreTrainedTokenizerBase":
    """Return the tokenizer of a model directory.

    Raises
    ------
    InputError
        The tokenizer cannot be loaded. The message names the file and the reason.
    """
    try:
        with importing():
            from transformers import AutoTokenizer

            # Only local files, and no code of the directory.
            tokenizer = AutoTokenizer.from_pretrained(
                directory,
                local_files_only=True,
                trust_remote_code=False,
                **own_configuration(directory),
            )
    except INTERRUPTS:
        raise
    # A panic in Rust, as in the tokenizers library, is not an Exception.
    except BaseException as error:
        raise _refused(directory, _reason(directory, error)) from error
    # transformers may return a tokenizer without any vocabulary instead of failing.
    file_names = {name for name in tokenizer.vocab_files_names.values() if isinstance(name, str)}
    if (
        file_names
        and not _vocabularies(directory)
        and not any((directory / name).exists() for name in file_names)
    ):
        raise _refused(directory, NOTHING_THERE)
    return tokenizer


def own_configuration(directory: Path) -> dict[str, Any]:
    """Return ``config`` for ``AutoTokenizer`` if blocks of the model have their own widths.

    It has no such widths, about which transformers would warn, and which no tokenizer needs.
    """
    path = directory / CONFIG
    if not path.exists():
        return {}
    document = read_json_object(path)
    kind = str(document.get("model_type"))
    if not document.get(PER_LAYER) or kind.startswith((STRUCTURED, SLICED)):
        return {}
    from transformers import AutoConfig

    # The tokenizer does not depend on the widths.
    values = {key: value for key, value in document.items() if key not in (PER_LAYER, "auto_map")}
    return {"config": AutoConfig.for_model(**values)}


def stored_template(directory: Path) -> str:
    """Return the chat template that transformers takes from a directory; empty if there is none.

    A directory whose tokenizer cannot be loaded has none.
    """
    if (file := directory / TEMPLATE_FILE).is_file():
        return file.read_text(encoding="utf-8", errors="replace")
    # A file that cannot be read has no template.
    if _damage(directory / SETTINGS_FILE) or not (directory / SETTINGS_FILE).exists():
        return ""
    template = read_json_object(directory / SETTINGS_FILE).get("chat_template")
    # Several templates are a list in older files, each with a name.
    if isinstance(template, list):
        templates = {
            entry.get("name"): entry.get("template")
            for entry in template
            if isinstance(entry, dict)
        }
        template = templates.get("default")
    return template if isinstance(template, str) else ""


def _refused(directory: Path, reason: str) -> EspalierError:
    return InputError(f"{directory}: the tokenizer cannot be loaded: {reason}")


NOTHING_THERE = (
    f"no file with a vocabulary exists ({', '.join(VOCABULARIES)}); copy the tokenizer's files from"
    " where the model came from, or write them with the tokenizer's save_pretrained"
)


def _vocabularies(directory: Path) -> set[str]:
    """Return the names of the files that hold a vocabulary."""
    paths = (path for pattern in VOCABULARIES for path in directory.glob(pattern))
    return {path.name for path in paths if path.is_file()}


def _reason(directory: Path, error: BaseException) -> str:
    """Return why loading failed: a damaged file if one is found, else the library's error."""
    vocabularies = _vocabularies(directory)
    # A damaged file explains more than the message of the library.
    # Links to missing files count too.
    names = {path.name for pattern in VOCABULARIES for path in directory.glob(pattern)}
    for name in sorted({*names, *VOCABULARIES, *OTHER_FILES}):
        if damage := _damage(directory / name):
            return damage
    # transformers names this option in its message if it refuses remote code.
    if "trust_remote_code" in str(error):
        settings = read_json_object(directory / SETTINGS_FILE)
        return (
            f"{SETTINGS_FILE} names the tokenizer's own code ({_own_code(settings)}), which is not"
            " executed; use a model with a tokenizer class of transformers, or save this"
            " tokenizer as tokenizer.json and remove auto_map"
        )
    if not vocabularies:
        return NOTHING_THERE
    if "tokenizer.json" not in vocabularies and len(missing := PAIR - vocabularies) == 1:
        return f"{missing.pop()} is missing; {COPY}"
    reason = f"{type(error).__name__}: {error}".strip()[:MAX_OF_A_REASON]
    if "tokenizer.json" in vocabularies:
        return (
            f"tokenizer.json and {SETTINGS_FILE} cannot be read together ({reason}); copy both"
            " again from where the model came from, or install the version of the library"
            f" tokenizers that wrote them (here: {version('tokenizers')})"
        )
    return (
        f"{', '.join(sorted(vocabularies))} cannot be read ({reason}); copy the tokenizer's files"
        " again, or write a tokenizer.json with its save_pretrained on a machine that has the"
        " library (sentencepiece or tiktoken) for these files"
    )


def _own_code(settings: dict[str, Any]) -> str:
    """Return the names of the tokenizer classes that need remote code."""
    auto_map = settings.get("auto_map")
    classes = auto_map.get("AutoTokenizer") if isinstance(auto_map, dict) else auto_map
    classes = classes if isinstance(classes, list) else [classes]
    return ", ".join(str(name)[:MAX_OF_A_REASON] for name in classes if name) or "auto_map"


def _damage(path: Path) -> str:
    """Return what is wrong with a file; an empty string if nothing is, or there is no file."""
    if path.is_symlink() and not path.exists():
        return f"{path.name} is a link to a missing file; {COPY}"
    if not path.exists():
        return ""
    try:
        with open(path, "rb") as file:
            start = file.read(len(LARGE_FILE_POINTER))
        if not start:
            return f"{path.name} is empty; {COPY}"
        if start == LARGE_FILE_POINTER:
            return f"{path.name} is a Git LFS pointer instead of the file; fetch it: git lfs pull"
        if path.suffix == ".json":
            read_json_object(path)
    except OSError as error:
        return f"{path.name} cannot be read ({error.strerror}); {COPY}"
    except InputError as error:
        return str(error)
    return ""
