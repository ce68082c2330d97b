"""Sites with which a site's tensors were summed, over all its runs.

If the same tensors of some sites are in two sums, of which one has another site in addition, the
difference of both sums is that site's tensors. Nobody has to break the protocol for it: one
drop-out in a repeated run is enough. So a site with ``min-secure-sum`` helps to unmask a sum with
the tensors of an earlier one only if it has the same sites.

Covers: tensors that are the same bit by bit, whatever settings the runs had. The record outlives
runs: ``<state-dir>/sums/<site>`` has a file for each round, named by the hash of the tensors, with
the names of the sites.
Does not cover: sums of tensors that differ a little, for example of one sample more. Sites without
``min-secure-sum``. An owner who deletes the record.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from client_app.site import Site
from espalier.environment.bounded_json import read_json
from espalier.errors import InputError
from espalier.storage.atomic import write_bytes
from espalier.storage.blobs import sha256
from espalier.storage.client_state import private_folder
from espalier.storage.directory_lock import in_turn

FOLDER = "sums"


def require_same_sites(
    site: Site, kind: str, tensors_sha256: Sequence[str], names: Iterable[str], *, keep: bool
) -> None:
    """Raise InputError if the same tensors were in a sum with other sites.

    Also if the record of such a sum is damaged, so that its sites are not known.

    Does nothing at simulated sites, whose runs are on one machine, and without ``min-secure-sum``.

    Parameters
    ----------
    tensors_sha256 : hashes of this site's blobs of the round, before they are masked
    names : sites of the sum
    keep : whether the site helps to unmask the sum now, so that it is recorded
    """
    if site.node.simulated or not site.node.min_secure_sum:
        return
    folder = private_folder(site.node.state_root(), FOLDER, site.name)
    file = folder / f"{sha256(json.dumps(list(tensors_sha256)).encode())}.json"
    sites = sorted(names)
    with in_turn(folder):
        if file.exists():
            if _recorded(kind, file) == sites:
                return
            told = (
                f"{kind}: min-secure-sum = {site.node.min_secure_sum}: the same tensors of this"
                " site are in the sum of another run, with other sites; the difference of both sums"
                " could be one site's tensors; run with the same sites, or with another seed, so"
                " that samples and tensors are others"
            )
            # The other run may be that of another server, which must not be told of its sites.
            raise InputError(f"{told} ({file} has the sites)", told)
        if keep:
            write_bytes(file, json.dumps(sites).encode(), 0o600)


def _recorded(kind: str, file: Path) -> list[str]:
    """Return the sites of an earlier sum; raise InputError if the file is damaged."""
    try:
        sites = read_json(file.read_text(encoding="utf-8"))
        if isinstance(sites, list) and sites:
            return sites
        fault = "it is not a list of sites"
    except OSError as error:
        fault = str(error.strerror)
    except ValueError as error:
        fault = str(error)
    told = (
        f"{kind}: the record of this site's earlier sums is damaged, so it does not help to unmask"
        " the sum"
    )
    remedy = "restore it from a backup, or run with another seed"
    raise InputError(f"{told} ({file}: {fault}); {remedy}", f"{told}; {remedy}")
