"""Extension of griffe for the API pages: descriptions on the line of their parameter.

Docstrings here say ``name : description``, because types are in the signature. The numpy style
reads what follows the colon as the type, so the description moves to a line of its own.
"""

import re
from typing import Any

import griffe

SECTION = re.compile(r"(?<=^Parameters\n----------\n)(?:.+\n?)+", re.MULTILINE)
PARAMETER = re.compile(r"^(\S.*?) : (.+)$", re.MULTILINE)


class DescriptionOnItsOwnLine(griffe.Extension):
    """Rewrites the section of parameters of each docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = SECTION.sub(
                lambda section: PARAMETER.sub(r"\1\n    \2", section[0]), obj.docstring.value
            )
