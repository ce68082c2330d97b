"""Sites with which a site's tensors were summed, over all its runs.

If the same tensor of some sites is in two sums, of which one has another site in addition, the
difference of both sums is that site's tensor. Nobody has to break the protocol for it: one drop-out
in a repeated run is enough. So a site with ``min-secure-sum`` helps to unmask a sum with a tensor
of an earlier one only if it has the same sites.

Covers: each tensor that is the same bit by bit, whatever its name and the other tensors of the
round are, and whatever settings the runs had. The record outlives runs: ``<state-dir>/sums/<site>``
has a file for each round, with the names of the sites and hashes of the tensors.
Does not cover: tensors of fewer than eight numbers, unless all tensors of the round are the same.
Sums of tensors that differ a little, for example of one sample more, or by a public
factor, such as those of pooled pruning with another ``weighting``. Sites without
``min-secure-sum``. An owner who deletes the record.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from client_app.site import Site
from espalier.environment.bounded_json import read_json
from espalier.errors import InputError
from espalier.storage.atomic import write_bytes
from espalier.storage.blobs import sha256
from espalier.storage.client_state import private_folder
from espalier.storage.directory_lock import in_turn

FOLDER = "sums"
SHORT = 16
"""Number of hexadecimal digits of a tensor's hash that a record has."""


def require_same_sites(
    site: Site, kind: str, tensors_sha256: Iterable[str], names: Iterable[str], *, keep: bool
) -> None:
    """Raise InputError if one of the tensors was in a sum with other sites.

    Also if the record of a sum is damaged, so that its sites are not known.

    Does nothing at simulated sites, whose runs are on one machine, and without ``min-secure-sum``.

    Parameters
    ----------
    tensors_sha256 : hashes of this site's tensors of the round, before they are masked
    names : sites of the sum
    keep : whether the site helps to unmask the sum now, so that it is recorded
    """
    if site.node.simulated or not site.node.min_secure_sum:
        return
    folder = private_folder(site.node.state_root(), FOLDER, site.name)
    own = {name[:SHORT] for name in tensors_sha256}
    document = {"sites": sorted(names), "tensors": sorted(own)}
    file = folder / f"{sha256(json.dumps(document).encode())}.json"
    with in_turn(folder):
        for earlier in sorted(folder.glob("*.json")):
            sites, tensors = _recorded(kind, earlier)
            if sites == document["sites"] or own.isdisjoint(tensors):
                continue
            told = (
                f"{kind}: min-secure-sum = {site.node.min_secure_sum}: the same tensors of this"
                " site are in an earlier sum, with other sites; the difference of both sums could"
                " be one site's tensors; run with the same sites, or with another seed, so that"
                " samples and tensors are others"
            )
            # The other run may be that of another server, which must not be told of its sites.
            raise InputError(f"{told} ({earlier} has the sites)", told)
        if keep:
            write_bytes(file, json.dumps(document).encode(), 0o600)


def _recorded(kind: str, file: Path) -> tuple[list[str], list[str]]:
    """Return sites and tensors of an earlier sum; raise InputError if the file is damaged."""
    try:
        document = read_json(file.read_text(encoding="utf-8"))
        if isinstance(document, dict):
            sites, tensors = document.get("sites"), document.get("tensors")
            if isinstance(sites, list) and isinstance(tensors, list) and sites:
                return sites, tensors
        fault = "it has no lists of sites and tensors"
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
