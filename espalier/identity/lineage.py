"""Lineage of a run: its name for clients, kept after a resumption.

Example: ``20260131-093000-0123456789ab``. A node creates files and directories with this name, so
it has one fixed format and length. It never equals a name that a node itself uses in its state
directory (``models``, ``egress`` ...), and two pairs of run and site never give the same file name.
"""

import re
from hashlib import sha256

LINEAGE = r"^[0-9]{8}-[0-9]{6}-[0-9a-f]{12}$"
"""Pattern of a lineage."""
NO_LINEAGE = "00000000-000000-000000000000"
"""Lineage for the case without a run: replies to unreadable messages, and estimates."""


def lineage_of(stamp: str, run_id: str) -> str:
    """Return the lineage of a run, from the date and time of its start and its Flower run id."""
    return f"{stamp}-{sha256(run_id.encode()).hexdigest()[:12]}"


def is_lineage(name: str) -> bool:
    """Return whether a text is a valid lineage."""
    return re.fullmatch(LINEAGE, name, re.ASCII) is not None
