"""Byte ledger: raw and sent bytes of every message, by run, round, client, kind and block."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from flwr.app import RecordDict

from espalier.environment.bounded_json import read_json
from espalier.messages.message import Header, MessageBody
from espalier.messages.records import num_bytes
from espalier.messages.tensor_blobs import DTYPE_BYTES, data_bytes
from espalier.models.plan import ModelPlan, block_key


@dataclass
class Traffic:
    """Bytes in each direction."""

    up: int = 0
    down: int = 0


class Ledger:
    """Writer of the byte ledger: one entry per message and one per blob, and totals per client.

    The ledger also records the simulated duration of rounds. Raw bytes are those of the tensors,
    without the header of a blob and any coding. Wire bytes are those that are sent. Dense bytes are
    those of the block's matrices in the model's files.

    Parameters
    ----------
    append : function that writes one entry
    dense_bytes : bytes of each block's dense matrices by blob key; see ``dense_bytes_of``
    """

    def __init__(
        self,
        append: Callable[[dict[str, Any]], None],
        dense_bytes: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self._append = append
        self._dense_bytes = dense_bytes
        self.by_client: dict[int, Traffic] = {}
        """Totals per client.

        Enrolment belongs to no client yet, so only the entries include it.
        """
        self._timed: set[tuple[int, int]] = set()
        """Rounds and clients that have an entry for their duration."""

    def record(
        self, direction: Literal["up", "down"], client: int, body: MessageBody, content: RecordDict
    ) -> None:
        """Record a message that matches its contract.

        Parameters
        ----------
        direction : "up" for a reply, "down" for a request
        client : number of the client; negative before the client has one
        """
        size, entry = self._counted(direction, client, body.header, content)
        blobs = sum(len(blob) for blob in body.blobs.values())
        # The first entry has the bytes of header and fields; one entry per blob follows.
        self._append(
            {**entry, "block": None, "raw_bytes": size - blobs, "wire_bytes": size - blobs}
        )
        for key, blob in sorted(body.blobs.items()):
            # Blocks with dense bytes show what was saved.
            dense = {"dense_bytes": self._dense_bytes[key]} if key in self._dense_bytes else {}
            self._append(
                {
                    **entry,
                    "block": key,
                    "raw_bytes": data_bytes(blob),
                    "wire_bytes": len(blob),
                    **dense,
                }
            )

    def record_refused(self, client: int, asked: Header, content: RecordDict) -> None:
        """Record a refused reply by its size; its content is neither read nor written down."""
        size, entry = self._counted("up", client, asked, content)
        self._append(
            {**entry, "block": None, "raw_bytes": None, "wire_bytes": size, "refused": True}
        )

    def record_round(
        self, lineage: str, server_round: int, client: int, virtual_seconds: float
    ) -> None:
        """Record the duration of a client's round on its simulated device; no bytes are counted.

        A second call for the same round and client has no effect.
        """
        if (server_round, client) in self._timed:
            return
        self._timed.add((server_round, client))
        entry = {
            "lineage": lineage,
            "round": server_round,
            "client": client,
            "direction": None,
            "kind": "round",
        }
        no_bytes = {"block": None, "raw_bytes": 0, "wire_bytes": 0}
        self._append(
            {**entry, "attempt": 1, "part": 0, **no_bytes, "virtual_seconds": virtual_seconds}
        )

    def _counted(
        self, direction: Literal["up", "down"], client: int, header: Header, content: RecordDict
    ) -> tuple[int, dict[str, Any]]:
        """Add the bytes of a message to the totals.

        Return these bytes and the values that all entries of the message share.
        """
        size = num_bytes(content)
        # Enrolment has no client number.
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
        """Return the totals over all clients."""
        up = sum(traffic.up for traffic in self.by_client.values())
        return Traffic(up, sum(traffic.down for traffic in self.by_client.values()))

    def state(self) -> list[list[int]]:
        """Return the totals for a checkpoint: [client, up, down] for each client."""
        return [
            [client, traffic.up, traffic.down] for client, traffic in sorted(self.by_client.items())
        ]

    def restore(self, state: list[list[int]], timed: Iterable[tuple[int, int]] = ()) -> None:
        """Restore the totals of a checkpoint.

        Messages that were sent after the checkpoint and are sent again count once.

        Parameters
        ----------
        state : value that ``state`` returned
        timed : rounds and clients whose duration is recorded already; see ``timed_in``
        """
        self.by_client = {client: Traffic(up, down) for client, up, down in state}
        self._timed = set(timed)


def timed_in(path: Path) -> Iterator[tuple[int, int]]:
    """Yield round and client of each duration in a ledger file; an incomplete line is skipped.

    There may be hundreds of thousands of other entries. They are not parsed; the text that
    ``JsonLines`` writes for the kind identifies the right ones.
    """
    if not path.exists():
        return
    with path.open(errors="replace") as lines:
        for line in lines:
            # A text search is much faster than parsing every line.
            if '"kind": "round"' in line:
                with suppress(ValueError, KeyError, TypeError):
                    entry = read_json(line)
                    yield int(entry["round"]), int(entry["client"])


def dense_bytes_of(plan: ModelPlan) -> dict[str, int]:
    """Return the bytes of each block's matrices in the model's files, by blob key."""
    return {
        block_key(block.index): sum(
            linear.num_weights * DTYPE_BYTES[linear.dtype] for linear in block.linears
        )
        for block in plan.blocks
    }


REQUESTS_AHEAD = 2
"""Number of requests that a client has at a time if its reply is sent in parts.

A SuperNode that finds no message sleeps for three seconds (`flower-supernode`). With two requests
the next one is available when the reply to the first is sent. The SuperLink also never stores more
than two replies.
"""
MARGIN = 60.0
"""Seconds after the deadline of a reply before Flower may delete the message."""


def lifetime(seconds: float) -> float:
    """Return the lifetime in seconds of a message whose reply may take ``seconds``.

    It includes the time for the reply to the request before it.
    """
    # Two requests may be open, so the second one waits for the answer to the first.
    return REQUESTS_AHEAD * seconds + MARGIN


def seconds_of(lifetime: float) -> float:
    """Return the maximum duration in seconds of the reply to a message with this lifetime."""
    return max(0.0, lifetime - MARGIN) / REQUESTS_AHEAD
