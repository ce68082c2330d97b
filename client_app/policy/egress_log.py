"""Log of everything that left a site in a run, as a hash chain (``hash_chain``).

The file is ``<state-dir>/egress/<lineage>-<site>.jsonl``. In addition to replies, it has entries
for replies that needed approval: ``held``, ``released`` and ``refused``, each with its time.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flwr.app import RecordDict

from espalier.messages.contract import Side
from espalier.messages.message import Fields, MessageBody
from espalier.messages.records import num_bytes
from espalier.messages.tensor_blobs import TensorSpec
from espalier.storage.blobs import sha256
from espalier.storage.client_state import OWNER_ONLY_FILE, private_folder
from espalier.storage.hash_chain import HashChain

FOLDER = "egress"


def egress_log(root: Path, lineage: str, site: str) -> HashChain:
    """Return the egress log of a site in a run; ``root`` is the site's ``state-dir``."""
    folder = private_folder(root, FOLDER)
    return HashChain(
        folder / f"{lineage}-{site}.jsonl", {"lineage": lineage, "site": site}, OWNER_ONLY_FILE
    )


def now() -> str:
    """Return the current UTC time in ISO format, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def reply_entry(
    body: MessageBody, content: RecordDict, side: Side, fields: Fields
) -> dict[str, Any]:
    """Return the log entry of a reply.

    It contains round, client and kind of the reply, and names, dtypes, shapes, sizes and SHA-256 of
    its contents, but no values.

    Parameters
    ----------
    letter : reply that matches its contract
    content : the reply as it is sent
    side : side of the contract against which it was checked
    fields : fields that the check returned
    """
    header = body.header
    specs = side.specs(fields)
    hashes = {} if side.blob_sha256 is None else side.blob_sha256(fields)
    return {
        "entry": "reply",
        "method": header.method,
        "round": header.server_round,
        "client": header.client,
        "kind": header.kind,
        "part": header.part,
        "status": header.status,
        "fields": sorted(body.fields),
        "bytes": num_bytes(content),
        "blobs": [
            described(key, blob, hashes.get(key) or sha256(blob), specs[key])
            for key, blob in sorted(body.blobs.items())
        ],
    }


def described(
    name: str, blob: bytes, digest: str, specs: Mapping[str, TensorSpec]
) -> dict[str, Any]:
    """Return the part of a log entry that describes one blob, its SHA-256 and its tensors."""
    tensors = {
        tensor: {"dtype": spec.dtype, "shape": list(spec.shape)} for tensor, spec in specs.items()
    }
    return {"name": name, "bytes": len(blob), "sha256": digest, "tensors": tensors}
