"""What somebody else wrote, as one short line that is safe to show and to store.

Covers: control characters and escape sequences, line ends of every kind, characters that change the direction or the form of
what is around them (Unicode's formats, bidirectional ones among them), piles of combining marks, and sheer length.
Does not cover: what the text says, or letters that look like others.
"""

import unicodedata

MOST_CHARACTERS = 600
"""Of a reason; what is longer is cut, and says so."""
MOST_MARKS = 2
"""Combining marks on one character; no script needs more of them after composition than this."""
UNPRINTABLE = "?"


def printable(text: str, most: int = MOST_CHARACTERS) -> str:
    """One line of at most ``most`` characters and a note of what is missing; what cannot be printed is a question mark.

    Line ends become a semicolon, or a blank where the line ends in a colon or in such a mark.
    """
    head = text[: 4 * most]  # nobody's megabyte is looked at
    lines = [line for line in map(str.strip, head.splitlines()) if line]
    shown = ""
    for line in lines:
        shown += f"{'' if not shown else ' ' if shown[-1] in ':;,.' else '; '}{line}"
    shown = without_control(shown, keep="")
    if len(shown) <= most and len(head) == len(text):
        return shown
    return f"{shown[:most]}... ({len(text)} characters)"


def without_control(text: str, keep: str = "\n") -> str:
    """The text with a question mark for each character that cannot be printed; those in ``keep`` stay."""
    found = []
    marks = 0
    for character in unicodedata.normalize("NFC", text):
        marks = marks + 1 if unicodedata.category(character) in ("Mn", "Me") else 0
        fine = (character.isprintable() or character in keep) and marks <= MOST_MARKS
        found.append(character if fine else UNPRINTABLE)
    return "".join(found)
