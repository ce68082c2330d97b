"""The byte ledger: what crossed the wire, per run, round, client, kind and block, raw and as sent."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flwr.app import RecordDict

from espalier.settings.bounded_json import read_json
from espalier.settings.mistakes import Mistake
from espalier.wire.messages import Header, Letter, num_bytes
from espalier.wire.payload import DTYPE_BYTES, block_key, tensor_specs
from espalier.wire.plan import ModelPlan


@dataclass
class Traffic:
    """Bytes in each direction."""

    up: int = 0
    down: int = 0


class Ledger:
    """Writes one entry per message and one per blob in it, and adds bytes up; beside them times of a fleet's rounds.

    Raw bytes are those of the tensors themselves, before a blob's header and any coding; wire bytes are those sent; dense
    bytes what the block's matrices have in the model's files.
    """

    def __init__(self, append: Callable[[dict[str, Any]], None]) -> None:
        self._append = append
        self.dense_bytes: Mapping[str, int] = {}
        """Bytes of each block's dense matrices by blob key, to compare with; see ``dense_bytes_of``."""
        self.by_client: dict[int, Traffic] = {}
        """Sums per client; enrolment, which belongs to no client yet, is only in the entries."""
        self._timed: set[tuple[int, int]] = set()
        """Rounds and clients whose times are among the entries."""

    def record(
        self, direction: Literal["up", "down"], client: int, letter: Letter, content: RecordDict
    ) -> None:
        """Count one message that its contract allows; ``content`` is the message as it travelled."""
        size, common = self._counted(direction, client, letter.header, content)
        blobs = sum(len(blob) for blob in letter.blobs.values())
        self._append(
            {**common, "block": None, "raw_bytes": size - blobs, "wire_bytes": size - blobs}
        )
        for key, blob in sorted(letter.blobs.items()):
            dense = {"dense_bytes": self.dense_bytes[key]} if key in self.dense_bytes else {}
            self._append(
                {
                    **common,
                    "block": key,
                    "raw_bytes": _raw_bytes(blob),
                    "wire_bytes": len(blob),
                    **dense,
                }
            )

    def record_refused(self, client: int, asked: Header, content: RecordDict) -> None:
        """Count a reply that was refused, by its bytes alone: nothing that is in it is read or written down.

        ``asked`` is the header of the request.
        """
        size, common = self._counted("up", client, asked, content)
        self._append(
            {**common, "block": None, "raw_bytes": None, "wire_bytes": size, "refused": True}
        )

    def record_round(
        self, lineage: str, server_round: int, client: int, virtual_seconds: float
    ) -> None:
        """Note how long a client's round would take on the device that the run pretends it to be; no bytes cross for that.

        What was noted once is not noted again.
        """
        if (server_round, client) in self._timed:
            return
        self._timed.add((server_round, client))
        place = {
            "lineage": lineage,
            "round": server_round,
            "client": client,
            "direction": None,
            "kind": "round",
        }
        none = {"block": None, "raw_bytes": 0, "wire_bytes": 0}
        self._append({**place, "attempt": 1, "part": 0, **none, "virtual_seconds": virtual_seconds})

    def _counted(
        self, direction: Literal["up", "down"], client: int, header: Header, content: RecordDict
    ) -> tuple[int, dict[str, Any]]:
        """Add a message's bytes up, and return them with what all of its entries have."""
        size = num_bytes(content)
        if client >= 0:
            traffic = self.by_client.setdefault(client, Traffic())
            setattr(traffic, direction, getattr(traffic, direction) + size)
        return size, {
            "lineage": header.lineage,
            "round": header.server_round,
            "client": client,
            "direction": direction,
            "kind": header.kind,
            "attempt": header.attempt,
            "part": header.part,
        }

    def total(self) -> Traffic:
        """Sums over all clients."""
        up = sum(traffic.up for traffic in self.by_client.values())
        return Traffic(up, sum(traffic.down for traffic in self.by_client.values()))

    def state(self) -> list[list[int]]:
        """The sums, for a checkpoint: [client, up, down] each."""
        return [
            [client, traffic.up, traffic.down] for client, traffic in sorted(self.by_client.items())
        ]

    def restore(self, state: list[list[int]], timed: Iterable[tuple[int, int]] = ()) -> None:
        """Take over what ``state`` returned, and of which rounds and clients times were noted before, see ``timed_in``.

        What was sent after that checkpoint and is sent again counts once.
        """
        self.by_client = {client: Traffic(up, down) for client, up, down in state}
        self._timed = set(timed)


def timed_in(path: Path) -> Iterator[tuple[int, int]]:
    """Round and client of each time in a ledger's file; a line that a dying machine tore has none.

    Other entries, of which there may be hundreds of thousands, are passed over unread, by how ``JsonLines`` writes them.
    """
    if not path.exists():
        return
    with path.open(errors="replace") as lines:
        for line in lines:
            if '"kind": "round"' in line:
                with suppress(ValueError, KeyError, TypeError):
                    entry = read_json(line)
                    yield int(entry["round"]), int(entry["client"])


def dense_bytes_of(plan: ModelPlan) -> dict[str, int]:
    """Bytes of each block's matrices as they are in the model's files, by blob key."""
    return {
        block_key(block.index): sum(
            linear.num_weights * DTYPE_BYTES[linear.dtype] for linear in block.linears
        )
        for block in plan.blocks
    }


def _raw_bytes(blob: bytes) -> int | None:
    try:
        return sum(spec.num_bytes for spec in tensor_specs(blob).values())
    except Mistake:
        return None
