"""The byte ledger: what crossed the wire, per run, round, client, kind and block, raw and as sent."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from flwr.app import RecordDict

from espalier.settings.mistakes import Mistake
from espalier.wire.messages import Letter, num_bytes
from espalier.wire.payload import tensor_specs


@dataclass
class Traffic:
    """Bytes in each direction."""

    up: int = 0
    down: int = 0


class Ledger:
    """Writes one entry per message and one per blob in it, and adds bytes up.

    Raw bytes are those of the tensors themselves, before a blob's header and any coding; wire bytes are those sent.
    """

    def __init__(self, append: Callable[[dict[str, Any]], None]) -> None:
        self._append = append
        self.by_rank: dict[int, Traffic] = {}
        """Sums per client; enrolment, which belongs to no client yet, is only in the entries."""

    def record(self, direction: Literal["up", "down"], rank: int, letter: Letter, content: RecordDict) -> None:
        """Count one message; ``content`` is the message as it travelled."""
        header = letter.header
        size = num_bytes(content)
        if rank >= 0:
            traffic = self.by_rank.setdefault(rank, Traffic())
            setattr(traffic, direction, getattr(traffic, direction) + size)
        common = {
            "lineage": header.lineage,
            "round": header.server_round,
            "rank": rank,
            "direction": direction,
            "kind": header.kind,
            "attempt": header.attempt,
            "part": header.part,
        }
        blobs = sum(len(blob) for blob in letter.blobs.values())
        self._append({**common, "block": None, "raw_bytes": size - blobs, "wire_bytes": size - blobs})
        for key, blob in sorted(letter.blobs.items()):
            self._append({**common, "block": key, "raw_bytes": _raw_bytes(blob), "wire_bytes": len(blob)})

    def total(self) -> Traffic:
        """Sums over all clients."""
        up = sum(traffic.up for traffic in self.by_rank.values())
        return Traffic(up, sum(traffic.down for traffic in self.by_rank.values()))

    def state(self) -> list[list[int]]:
        """The sums, for a checkpoint: [rank, up, down] each."""
        return [[rank, traffic.up, traffic.down] for rank, traffic in sorted(self.by_rank.items())]

    def restore(self, state: list[list[int]]) -> None:
        """Take over what ``state`` returned; what was sent after that checkpoint and is sent again counts once."""
        self.by_rank = {rank: Traffic(up, down) for rank, up, down in state}


def _raw_bytes(blob: bytes) -> int | None:
    try:
        return sum(spec.num_bytes for spec in tensor_specs(blob).values())
    except Mistake:
        return None
