"""Reading of ``flower-supernode --node-config``, as Flower reads it, but with an error where Flower would be silent."""

import re
from typing import Any

from espalier.settings.mistakes import Mistake

PAIR = re.compile(r"\S+?=('[^']*'|\"[^\"]*\"|\S+)")
"""What Flower takes for a key and its value; it passes over everything else without a word."""


def read_node_config(text: str) -> dict[str, Any]:
    """Keys and values of ``flower-supernode --node-config``, read as Flower reads them: pairs, or the name of a TOML file.

    Raises
    ------
    Mistake
        Flower could not read it, or would pass over a part of it.
    """
    from flwr.common.config import parse_config_args

    if not text.endswith(".toml") and (rest := PAIR.sub("", text).strip()):
        raise Mistake(
            f"node-config: {rest!r} is no key=value, and Flower would pass over it; write"
            " key=value, without blanks"
        )
    try:
        return dict(parse_config_args([text]))
    except OSError as error:
        raise Mistake(
            f"node-config: {text}: cannot be read ({error.strerror}); name a TOML file, or give"
            " key=value pairs"
        ) from None
    except Exception:  # of the library that Flower reads it with
        raise Mistake(
            f"node-config: {text!r}: Flower cannot read it; a value is a number, true, false or a"
            " string in its own quotes, for instance 'site=\"hospital-a\" windows=16'"
        ) from None
