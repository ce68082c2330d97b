"""Names of runs that tests request by hand."""

from espalier.identity.names import lineage_of

BY_HAND = "20260131-093000-0123456789ab"


def named(word: str) -> str:
    """Return the name of a run, a different one for each word."""
    return lineage_of("20260131-093000", word)
