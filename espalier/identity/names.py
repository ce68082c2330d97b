"""Names of runs, and untrusted text as one short line that is safe to show and to store.

Covers: control characters and escape sequences; line ends of every kind; characters that change the
direction or form of their neighbors (Unicode format characters, including bidirectional ones); many
combining marks on one character; length.
Does not cover: the meaning of the text, or letters that look like others.

Example: ``20260131-093000-0123456789ab``. A node creates files and directories with this name, so
it has one fixed format and length. It never equals a name that a node itself uses in its state
directory (``models``, ``egress`` ...), and two pairs of run and site never give the same file name.
"""

import re
import unicodedata
from hashlib import sha256

MAX_CHARACTERS = 600
"""Maximum number of characters of a reason; a longer one is cut with a note."""
MAX_MARKS = 2
"""Maximum number of combining marks on a character; no composed text of any script needs more."""
UNPRINTABLE = "?"
"""Replacement for a character that cannot be printed."""


def printable(text: str, most: int = MAX_CHARACTERS) -> str:
    """Return ``text`` as one line of at most ``most`` characters, with a note if it was cut.

    Unprintable characters become question marks. A line end becomes a semicolon, or a blank after a
    line that ends in punctuation.
    """
    # Limit the work for very long text.
    head = text[: 4 * most]
    lines = [line for line in map(str.strip, head.splitlines()) if line]
    shown = ""
    for line in lines:
        shown += f"{'' if not shown else ' ' if shown[-1] in ':;,.' else '; '}{line}"
    shown = without_control(shown, keep="")
    if len(shown) <= most and len(head) == len(text):
        return shown
    return f"{shown[:most]}... ({len(text)} characters)"


def without_control(text: str, keep: str = "\n") -> str:
    """Return ``text`` with a question mark for each unprintable character not in ``keep``."""
    # Combining marks that follow each other on one character.
    characters = []
    marks = 0
    # Compose characters first, so that ordinary accents do not count as marks.
    for character in unicodedata.normalize("NFC", text):
        marks = marks + 1 if unicodedata.category(character) in ("Mn", "Me") else 0
        is_allowed = (character.isprintable() or character in keep) and marks <= MAX_MARKS
        characters.append(character if is_allowed else UNPRINTABLE)
    return "".join(characters)


LINEAGE = r"^[0-9]{8}-[0-9]{6}-[0-9a-f]{12}$"
"""Pattern of a lineage."""
STAMP = "%Y%m%d-%H%M%S"
"""Format of a run's start time in its lineage and in the name of its directory."""
NO_LINEAGE = "00000000-000000-000000000000"
"""Lineage for the case without a run: replies to unreadable messages, and estimates."""


def lineage_of(stamp: str, run_id: str) -> str:
    """Return the lineage of a run, from the date and time of its start and its Flower run id."""
    return f"{stamp}-{sha256(run_id.encode()).hexdigest()[:12]}"


def is_lineage(name: str) -> bool:
    """Return whether a text is a valid lineage."""
    return re.fullmatch(LINEAGE, name, re.ASCII) is not None
