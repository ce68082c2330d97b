"""Parser of ``flower-supernode --node-config`` that refuses what Flower silently ignores."""

import re
from typing import Any

from espalier.errors import InputError

PAIR = re.compile(r"\S+?=('[^']*'|\"[^\"]*\"|\S+)")
"""Pattern of what Flower takes for a key and its value; it ignores everything else."""


def read_node_config(text: str) -> dict[str, Any]:
    """Return the keys and values of ``--node-config``: pairs, or the name of a TOML file.

    Raises
    ------
    InputError
        Flower could not read the text or would ignore a part.
    """
    from flwr.common.config import parse_config_args

    if not text.endswith(".toml") and (rest := PAIR.sub("", text).strip()):
        raise InputError(
            f"node-config: {rest!r} is not key=value, and Flower would ignore it; write"
            " key=value without spaces"
        )
    try:
        return dict(parse_config_args([text]))
    except OSError as error:
        raise InputError(
            f"node-config: {text}: cannot be read ({error.strerror}); name a TOML file, or give"
            " key=value pairs"
        ) from None
    except Exception:
        # The library that Flower uses may raise any exception.
        raise InputError(
            f"node-config: {text!r}: Flower cannot read it; a value is a number, true, false or"
            " a string in quotes, for example 'site=\"hospital-a\" num-samples=16'"
        ) from None
