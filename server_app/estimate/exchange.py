"""Size of a request and its reply, computed from their contract.

Nothing is sent and no blob is built. The size is what the ledger counts: values and names of a
message (``messages.num_bytes``), without Flower's envelope.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from espalier.identity.lineage import NO_LINEAGE
from espalier.messages.contract import BlockSpecs, Contract
from espalier.messages.contracts import contract_for
from espalier.messages.message import (
    SCHEMA_VERSION,
    Header,
    Kind,
    Letter,
    Scalars,
    num_bytes,
    validate,
    write,
)
from espalier.messages.payload import packed_bytes
from espalier.models.plan import ModelPlan
from espalier.settings.run import RunSettings

HASH = "0" * 64


@dataclass(frozen=True)
class Exchange:
    """Bytes of a request and of its reply."""

    kind: Kind
    server_round: int
    """Round number; 0 for enrolment.

    A message after the last round has that round's number, or the next one.
    """
    down: int
    up: int
    largest: int
    """Bytes of the larger of the two."""


@dataclass(frozen=True)
class Traffic:
    """Sums over exchanges."""

    down: int = 0
    up: int = 0
    messages: int = 0
    """Number of requests; each has a reply."""
    largest: int = 0
    """Bytes of the largest single message."""
    largest_request: int = 0
    largest_reply: int = 0

    @staticmethod
    def of(exchanges: Iterable[Exchange]) -> "Traffic":
        """Return the sums over the given exchanges."""
        found = list(exchanges)
        down = sum(one.down for one in found)
        up = sum(one.up for one in found)
        most = [max((size(one) for one in found), default=0) for size in (_largest, _down, _up)]
        return Traffic(down, up, len(found), *most)


def _largest(one: Exchange) -> int:
    return one.largest


def _down(one: Exchange) -> int:
    return one.down


def _up(one: Exchange) -> int:
    return one.up


class Correspondence:
    """Calculator of message sizes between a server and one client of a run.

    Parameters
    ----------
    plan : plan of the model that clients work on
    """

    def __init__(self, settings: RunSettings, plan: ModelPlan) -> None:
        self.settings = settings
        self.plan = plan

    def contract(
        self,
        kind: Kind,
        server_round: int,
        scalars: Mapping[str, Any],
        blobs: Mapping[str, bytes],
        part: int,
    ) -> Contract:
        """Return the contract of a request."""
        letter = Letter(self._header(kind, server_round, part), dict(scalars), dict(blobs))
        return contract_for(letter, lambda: self.plan, self.settings)

    def exchange(
        self,
        kind: Kind,
        server_round: int,
        scalars: Scalars,
        blobs: Mapping[str, bytes] | None = None,
        part: int = 0,
        told: Mapping[str, Any] | None = None,
    ) -> Exchange:
        """Return the sizes of one request and its reply.

        Parameters
        ----------
        scalars : fields of the request
        blobs : those blobs of the request on which the shapes of the others depend
        told : values of the reply's fields that are lists or text; all others are numbers
        """
        asked = scalars.model_dump()
        made = self.contract(kind, server_round, asked, blobs or {}, part)
        specs = made.down.specs(validate(made.down.scalars, asked))
        replied = reply_scalars(made.up.scalars, told or {})
        header = self._header(kind, server_round, part)
        down = letter_bytes(header, asked, specs)
        up = letter_bytes(
            header, replied, made.up.specs(made.up.scalars.model_construct(**replied))
        )
        return Exchange(kind, server_round, down, up, max(down, up))

    def train(
        self,
        server_round: int,
        order: Scalars,
        part_order: Mapping[str, Any] | None = None,
        order_blobs: Mapping[str, bytes] | None = None,
        along: Mapping[str, bytes] | None = None,
        told: Mapping[str, Any] | None = None,
    ) -> list[Exchange]:
        """Return the sizes of a ``train``, and of a ``fetch`` for each further part of the reply.

        Parameters
        ----------
        part_order : fields of a ``fetch`` in addition to its hashes
        along : blobs that are sent with each ``fetch``
        """
        first = self.contract("train", server_round, order.model_dump(), order_blobs or {}, 0)
        keys = [self._num_blobs(first)]
        found = list[Exchange]()
        for part in range(1, first.num_parts):
            # The contract gives the number of hashes, so one hash stands for all until then.
            asked = {**(part_order or {}), "blob_sha256": [HASH]}
            made = self.contract("fetch", server_round, asked, along or {}, part)
            keys.append(self._num_blobs(made))
            scalars = made.down.scalars.model_validate({**asked, "blob_sha256": [HASH] * keys[-1]})
            found.append(self.exchange("fetch", server_round, scalars, along, part))
        hashes = {"blob_sha256": [HASH] * sum(keys)}
        return [
            self.exchange("train", server_round, order, order_blobs, 0, {**hashes, **(told or {})}),
            *found,
        ]

    def num_parts(
        self, server_round: int, order: Scalars, blobs: Mapping[str, bytes] | None = None
    ) -> int:
        """Return the number of parts of the reply to a ``train``."""
        return self.contract("train", server_round, order.model_dump(), blobs or {}, 0).num_parts

    def _num_blobs(self, made: Contract) -> int:
        # Fields without values are enough, because the number of blobs does not depend on them.
        return len(made.up.specs(made.up.scalars.model_construct()))

    def _header(self, kind: Kind, server_round: int, part: int) -> Header:
        return Header(
            schema_version=SCHEMA_VERSION, kind=kind, method=self.settings.method, lineage=NO_LINEAGE,
            server_round=server_round, client=0, attempt=1, part=part, num_parts=1,
        )  # fmt: skip


def letter_bytes(header: Header, scalars: Mapping[str, Any], specs: BlockSpecs) -> int:
    """Return the size in bytes of a message with these blobs, as the ledger counts it."""
    beside = num_bytes(write(Letter(header, dict(scalars))))
    return beside + sum(len(key) + packed_bytes(tensors) for key, tensors in specs.items())


def reply_scalars(kind: type[Scalars], told: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields of a reply that have the size of the real ones.

    Numbers are 0 and booleans False; ``told`` has all other values.
    """
    zeros = {
        name: False if field.annotation is bool else 0 for name, field in kind.model_fields.items()
    }
    return {**zeros, **{name: value for name, value in told.items() if name in zeros}}
