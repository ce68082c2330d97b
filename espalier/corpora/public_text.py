"""Public texts on which models are compared."""

from espalier.corpora import documentation
from espalier.corpora.files import read_text
from espalier.corpora.passages import split


def public_text(name: str, path: str) -> str:
    """Text of one entry of ``evaluation.texts``: a file as it is, or the held-out part of the documentation.

    Raises
    ------
    Mistake
        The file is missing, empty or not UTF-8.
    """
    if path:
        return "".join(read_text(path, "evaluation.texts"))
    _, held_out = split(text for source in documentation.SOURCES for text in documentation.texts(source))
    return "\n\n".join(held_out)
