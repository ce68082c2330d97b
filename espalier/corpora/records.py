"""A record: a text and its label."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Record:
    """A text and what it is labelled with; an empty label where there is none."""

    text: str
    label: str = ""
