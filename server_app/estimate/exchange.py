"""Sizes of a request and its reply, computed from their contract.

No blob is built. The size is what the ledger counts: values and names of a message
(``messages.num_bytes``), without Flower's envelope.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from espalier.messages.contract import BlockSpecs, Contract
from espalier.messages.message import Fields, Header, Kind, MessageBody
from espalier.messages.records import num_bytes, write
from espalier.messages.tensor_blobs import packed_bytes

HASH = "0" * 64


@dataclass(frozen=True)
class Exchange:
    """Bytes of a request and of its reply."""

    kind: Kind
    server_round: int
    """Round number.

    A message after the last round has that round's number, or the next one.
    """
    down: int
    up: int

    @property
    def num_bytes(self) -> int:
        """Bytes in both directions."""
        return self.down + self.up

    @staticmethod
    def of(request: MessageBody, contract: Contract, answer: Mapping[str, Any]) -> "Exchange":
        """Return the sizes of a request without blobs and of a reply with these fields."""
        header = request.header
        down = _num_bytes(header, request.fields, contract.down.blobs)
        up = _num_bytes(header, answer, contract.up.blobs)
        return Exchange(header.kind, header.server_round, down, up)


@dataclass(frozen=True)
class Traffic:
    """Sums over exchanges."""

    down: int = 0
    up: int = 0
    messages: int = 0
    """Number of requests; each has a reply."""
    largest_request: int = 0
    """Bytes of the largest request."""
    largest_reply: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes in both directions."""
        return self.down + self.up

    @property
    def largest(self) -> int:
        """Bytes of the largest single message."""
        return max(self.largest_request, self.largest_reply)

    @staticmethod
    def of(exchanges: Iterable[Exchange]) -> "Traffic":
        """Return the sums over the given exchanges."""
        found = list(exchanges)
        downs = [one.down for one in found]
        ups = [one.up for one in found]
        return Traffic(sum(downs), sum(ups), len(found), max(downs, default=0), max(ups, default=0))


def fields_of_reply(kind: type[Fields], known: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields of a reply that have the size of the real ones.

    Numbers are 0 and booleans False; ``known`` has the values of all other fields.
    """
    zeros = {
        name: False if field.annotation is bool else 0 for name, field in kind.model_fields.items()
    }
    return {**zeros, **{name: value for name, value in known.items() if name in zeros}}


def _num_bytes(header: Header, fields: Mapping[str, Any], specs: BlockSpecs) -> int:
    beside = num_bytes(write(MessageBody(header, dict(fields))))
    return beside + sum(len(key) + packed_bytes(tensors) for key, tensors in specs.items())
