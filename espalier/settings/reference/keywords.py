"""Settings as keyword arguments of ``espalier.simulate`` and ``espalier.submit``.

A keyword is a settings key with ``_`` in place of each hyphen and dot: ``lora_rank`` is
``lora.rank``. ``run_keywords.py`` has the types of all keywords; ``python -m
tests.pages.settings_page`` writes it.
"""

import difflib
import os
from collections.abc import Mapping
from typing import Any

from espalier.errors import InputError
from espalier.settings.keys import default_values


def keyword_of(key: str) -> str:
    """Return the keyword of a settings key: ``lora.rank`` becomes ``lora_rank``."""
    return key.replace("-", "_").replace(".", "_")


def settings_from(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by dotted key from keyword arguments; paths become text.

    Raises InputError if a keyword is not the one of a setting.
    """
    keys = {keyword_of(key): key for key in default_values()}
    lines = []
    for keyword in keywords:
        if keyword not in keys:
            close = difflib.get_close_matches(keyword_of(keyword), keys, n=1, cutoff=0.7)
            meant = f"did you mean {close[0]}? " if close else ""
            lines.append(
                f"{keyword}: there is no such setting; {meant}a keyword is a settings key with _"
                " in place of each hyphen and dot, such as lora_rank"
            )
    if lines:
        raise InputError("\n".join(lines))
    return {keys[keyword]: _plain(value) for keyword, value in keywords.items()}


def _plain(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value
