"""Places of the pages of methods."""

from espalier.settings.registry import METHODS


def page_of(method: str) -> str:
    """Return the path of a method's page, below docs/methods and docs/findings."""
    family = "tuning" if METHODS[method].tunes else "pruning"
    return f"{family}/{method}.md"
