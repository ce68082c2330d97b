"""The name of a run to its clients, the same after it was resumed: ``20260131-093000-0123456789ab``.

A node makes files and directories of this name, so it has one form, of one length. No name that a node uses itself in its state
directory (``models``, ``egress`` ...) has it, and two pairs of run and site never give the same file name.
"""

import re
from hashlib import sha256

LINEAGE = r"^[0-9]{8}-[0-9]{6}-[0-9a-f]{12}$"
"""Pattern of a run's name."""
NO_LINEAGE = "00000000-000000-000000000000"
"""The name where there is no run: in the answer to what could not be read, and in plans."""


def lineage_of(stamp: str, run_id: str) -> str:
    """Return the name of the run that began at ``stamp`` (date and time) and has this id in Flower."""
    return f"{stamp}-{sha256(run_id.encode()).hexdigest()[:12]}"


def is_lineage(name: str) -> bool:
    """Return whether a run may be called so."""
    return re.fullmatch(LINEAGE, name, re.ASCII) is not None
