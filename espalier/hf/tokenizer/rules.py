"""Allow-list for tokenizers that a server sends: components and patterns of known tokenizers.

Covers: ``tokenizer.json``, both the file and the tokenizer that transformers built from it.
Components have known types, regular expressions consist of alternatives from published tokenizers,
normalizers lengthen a text by at most a small factor, and no token is drawn at random.

Does not cover: a vocabulary that exploits a weakness of a library. The tokenizer therefore runs in
a process with limits.
"""

import re
from base64 import b64decode
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from espalier.environment.bounded_json import read_json_object
from espalier.errors import InputError

KINDS = {
    "normalizer": (
        "Sequence", "BertNormalizer", "ByteLevel", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt",
        "Precompiled", "Prepend", "Replace", "Strip", "StripAccents",
    ),
    "pre_tokenizer": (
        "Sequence", "BertPreTokenizer", "ByteLevel", "CharDelimiterSplit", "Digits", "FixedLength",
        "Metaspace", "Punctuation", "Split", "UnicodeScripts", "Whitespace", "WhitespaceSplit",
    ),
    "post_processor": (
        "Sequence", "BertProcessing", "ByteLevel", "RobertaProcessing", "TemplateProcessing",
    ),
    "decoder": (
        "Sequence", "BPEDecoder", "ByteFallback", "ByteLevel", "CTC", "Fuse", "Metaspace",
        "Replace", "Strip", "WordPiece",
    ),
    "model": ("BPE", "Unigram", "WordLevel", "WordPiece"),
}  # fmt: skip
"""Allowed types of each section of the file."""

KNOWN_PATTERNS = (
    # GPT-2.
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    # LLaMA 3.
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    ),
    # Qwen2.
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    ),
    # Qwen3.5.
    r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
    # GPT-4.
    (
        r"'(?:[sdmt]|ll|ve|re)|'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|"
        r" ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]"
    ),
    # GPT-4o, Mistral, LLaMA 4.
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    ),
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    ),
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
    # CLIP.
    r"[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+",
    # Digits.
    r"\p{N}{1,3}|[0-9]{1,3}|[0-9]|\d|\p{N}+",
    # DeepSeek-V3.
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+""",
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*",
    # SentencePiece, as transformers writes it.
    r" {2,}|\s{2,}|[\n\r\t]|\n|\s+|\A +| +\z|\A▁|^▁+$| +▁|[\r\n]",
    # BLOOM.
    r" ?[^(\s|.,!?…。，、।۔،)]+|\s?\p{L}+|\s?\p{N}+",
)
"""Regular expressions of published tokenizers; their alternatives may be combined."""
LITERAL = re.compile(r"(?:\\[^A-Za-z0-9]|[^\\.^$*+?{}\[\]()|])+")
"""Alternative that matches only itself, as ``re.escape`` writes it."""

MAX_PARTS = 64
"""Maximum number of parts of a sequence or template, and of tokens for one part."""
MAX_GROWTH = 16
"""Maximum number of characters that a normalizer may produce from one character."""
MAX_WORD = 256
"""Maximum number of characters of a normalizer's search text or replacement."""
MAX_ADDED = 1 << 16
MAX_ADDED_CHARACTERS = 4096
MAX_CHARSMAP = 1 << 21
"""Maximum number of characters of SentencePiece's normalisation table."""
MAX_MAPPED = 32
"""Maximum number of characters of a string in this table; NFKC makes up to 18 of one."""
ONCE = ("ByteLevel", "Precompiled")
"""Normalizers of which a tokenizer has one at most: each further one could double the text."""
MAX_PADDING = 1 << 20
MAX_WORDPIECE = 1000
"""Maximum number of characters of a word for WordPiece, whose time grows with their square."""


def alternatives(pattern: str) -> Iterator[str]:
    """Yield the alternatives of a regular expression.

    The expression is split at each ``|`` outside of groups and character classes.
    """
    start = depth = 0
    in_class = escaped = False
    for position, body in enumerate(pattern):
        if escaped:
            escaped = False
        elif body == "\\":
            escaped = True
        elif in_class:
            in_class = (
                # A "]" that comes first in a class is a literal and does not close it.
                body != "]"
                or pattern[position - 1] == "["
                or pattern[position - 2 : position] == "[^"
            )
        elif body == "[":
            in_class = True
        elif body in "()":
            depth += 1 if body == "(" else -1
        elif body == "|" and depth == 0:
            yield pattern[start:position]
            start = position + 1
    yield pattern[start:]


_KNOWN = frozenset(
    alternative for pattern in KNOWN_PATTERNS for alternative in alternatives(pattern)
)


def is_known_pattern(pattern: str) -> bool:
    """Return whether a regular expression consists of known alternatives or literal text."""
    return all(part in _KNOWN or LITERAL.fullmatch(part) for part in alternatives(pattern))


def require_known_parts(document: Any, where: str) -> None:
    """Refuse a ``tokenizer.json`` with components that are not on the allow-list.

    Parameters
    ----------
    document : content of the file
    where : name of the file, for error messages

    Raises
    ------
    InputError
        A component is not allowed. The message names the section and the reason.
    """
    try:
        for section, types in KINDS.items():
            for part in _parts(document.get(section), section):
                if part["type"] not in types:
                    raise _Fault(
                        section,
                        f"type {str(part['type'])[:64]!r} is not one of {', '.join(sorted(types))}",
                    )
                _require_plain(section, part)
        _require_growth(document)
        _require_added(document)
    except _Fault as fault:
        raise InputError(
            f"{where}: {fault}; sites accept only tokenizers with known parts from a server; use"
            " a model with such a tokenizer"
        ) from None
    except (AttributeError, KeyError, TypeError, ValueError):
        raise InputError(
            f"{where}: is not a file of the tokenizers library; use a model with such a file"
        ) from None


def require_known_tokenizer(directory: Path) -> None:
    """Refuse a model directory whose ``tokenizer.json`` has components that are not allowed.

    A directory without this file passes. Raises InputError if the file is not JSON, or see
    ``require_known_parts``.
    """
    path = directory / "tokenizer.json"
    if not path.exists():
        return
    require_known_parts(read_json_object(path), str(path))


class _Fault(Exception):
    """Error for a section with something that is not allowed."""

    def __init__(self, section: str, problem: str) -> None:
        super().__init__(f"{section}: {problem}")


def _parts(part: Any, section: str) -> Iterator[Mapping[str, Any]]:
    """Yield a component and, recursively, the components that it consists of."""
    if part is None:
        return
    # Older files have no type; the library tries the types one by one.
    if section == "model" and "type" not in part:
        vocabulary_type = "Unigram" if isinstance(part["vocab"], list) else "WordLevel"
        part = {**part, "type": "BPE" if "merges" in part else vocabulary_type}
    yield part
    if part["type"] == "Sequence":
        keys = ("normalizers", "pretokenizers", "processors", "decoders")
        components: list[Any] = next((part[key] for key in keys if key in part), [])
        if len(components) > MAX_PARTS:
            raise _Fault(
                section, f"a sequence has {len(components)} parts; at most {MAX_PARTS} are allowed"
            )
        for inner in components:
            yield from _parts(inner, section)


def _require_plain(section: str, part: Mapping[str, Any]) -> None:
    """Refuse unknown patterns, and numbers that make a component slow or its output large."""
    for name in ("pattern", "delimiter"):
        _require_pattern(section, part.get(name, ""))
    for name in ("content", "prepend", "replacement"):
        if len(str(part.get(name) or "")) > MAX_WORD:
            raise _Fault(section, f"{name} has more than {MAX_WORD} characters")
    _require_short_results(section, part.get("precompiled_charsmap") or "")
    if part.get("dropout"):
        raise _Fault(section, f"dropout = {part['dropout']}: tokens would be drawn at random")
    if section == "model" and int(part.get("max_input_chars_per_word") or 0) > MAX_WORDPIECE:
        raise _Fault(section, f"max_input_chars_per_word is more than {MAX_WORDPIECE}")
    if part["type"] == "TemplateProcessing":
        tokens = [token["ids"] for token in (part.get("special_tokens") or {}).values()]
        lists = [part.get("single") or [], part.get("pair") or [], tokens, *tokens]
        if max(map(len, lists)) > MAX_PARTS:
            raise _Fault(section, f"a template has more than {MAX_PARTS} parts or tokens")


def _require_short_results(section: str, table: str) -> None:
    """Refuse a normalisation table that is large, or makes a long string of one character."""
    if len(table) > MAX_CHARSMAP:
        raise _Fault(section, f"precompiled_charsmap has more than {MAX_CHARSMAP} characters")
    # The table: size of a trie in bytes, the trie in words of 4 bytes, strings that end with NUL.
    data = b64decode(table)
    start = 4 + int.from_bytes(data[:4], "little") // 4 * 4
    longest = max(map(len, data[start:].decode(errors="replace").split("\0")))
    if longest > MAX_MAPPED:
        raise _Fault(section, f"precompiled_charsmap has a string of {longest} characters")


def _require_pattern(section: str, pattern: str | Mapping[str, str]) -> None:
    if isinstance(pattern, str):
        pattern = {"String": pattern}
    string = pattern.get("String", "")
    expression = pattern.get("Regex", "")
    if len(string) > MAX_WORD:
        raise _Fault(section, f"a pattern has more than {MAX_WORD} characters")
    if expression and not is_known_pattern(expression):
        raise _Fault(section, "a regular expression is not that of a published tokenizer")


def _require_growth(document: Mapping[str, Any]) -> None:
    """Refuse normalizers that together could turn a short text into a long one."""
    growth = 1.0
    parts = list(_parts(document.get("normalizer"), "normalizer"))
    number = Counter(part["type"] for part in parts)
    if repeated := [kind for kind in ONCE if number[kind] > 1]:
        raise _Fault("normalizer", f"has the type {repeated[0]!r} {number[repeated[0]]} times")
    for part in parts:
        # It stands before each stretch between two added tokens, which may be one character.
        if part["type"] == "Prepend":
            growth *= 1 + len(part["prepend"])
        if part["type"] == "Replace":
            pattern = part["pattern"]
            length = len(pattern["String"]) if "String" in pattern else 1
            growth *= max(1.0, len(part["content"]) / max(1, length))
    if growth > MAX_GROWTH:
        raise _Fault(
            "normalizer", f"makes {growth:.3g} characters of one; at most {MAX_GROWTH} are allowed"
        )


def _require_added(document: Mapping[str, Any]) -> None:
    """Refuse too many or too long added tokens, and padding beyond any model's length."""
    added = document.get("added_tokens") or []
    if len(added) > MAX_ADDED or any(
        len(token["content"]) > MAX_ADDED_CHARACTERS for token in added
    ):
        raise _Fault(
            "added_tokens",
            f"more than {MAX_ADDED}, or one of more than {MAX_ADDED_CHARACTERS} characters",
        )
    padding = document.get("padding") or {}
    fixed = padding.get("strategy")
    lengths = [fixed["Fixed"]] if isinstance(fixed, Mapping) else []
    if any(length > MAX_PADDING for length in (*lengths, padding.get("pad_to_multiple_of") or 0)):
        raise _Fault("padding", f"to more than {MAX_PADDING} tokens")
