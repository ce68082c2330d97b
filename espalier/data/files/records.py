"""Record with a text and a label."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Record:
    """Text with its label; the label is empty if the source has none."""

    text: str
    label: str = ""
