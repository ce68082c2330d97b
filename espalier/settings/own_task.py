"""Prompt template and labels of the tasks ``completion`` and ``classification``."""

from string import Formatter

COMPLETION = "completion"
CLASSIFICATION = "classification"
OWN_TASKS = (COMPLETION, CLASSIFICATION)
"""Names of the tasks whose prompt is ``data.prompt``."""


def prompt_text(template: str) -> str:
    r"""Return a template with line breaks and tabs in place of ``\n`` and ``\t``.

    A shell passes these on as two characters.
    """
    return template.replace("\\n", "\n").replace("\\t", "\t")


def prompt_fields(template: str) -> list[str]:
    """Return the fields that a template names in braces; doubled braces stand for braces.

    Raises
    ------
    ValueError
        The template names no field, or has braces that it cannot have.
    """
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"{error}; write {{{{ and }}}} for braces") from None
    for _, name, form, conversion in parts:
        if name is not None and (form or conversion or not name or set(name) & set(".[]")):
            raise ValueError("braces may hold the name of a field only, such as {question}")
    names = list(dict.fromkeys(name for _, name, _, _ in parts if name))
    if not names:
        raise ValueError("names no field of a record; write one in braces, such as {question}")
    return names


def listed_labels(text: str) -> tuple[str, ...]:
    """Return the labels of a comma-separated list.

    Raises
    ------
    ValueError
        There are fewer than two labels, or one is empty or occurs twice.
    """
    labels = tuple(map(str.strip, text.split(",")))
    if len(labels) < 2 or "" in labels or len(set(labels)) < len(labels):
        raise ValueError("write at least two different labels, separated by commas")
    return labels
