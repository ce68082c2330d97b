"""What may be too large for a message travels in parts, in both directions, whatever the method.

A ``train`` is answered with the first part of its reply, and ``fetch`` asks for others by hash: which parts there are, whose
blobs they hold, and that every blob has the hash that the report named for it. ``deliver`` brings a result part by part.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from espalier.settings.mistakes import Mistake
from espalier.settings.run import RunSettings
from espalier.wire.contract import BlockSpecs, CheckValues, Contract, Side
from espalier.wire.messages import MOST_SECONDS, Letter, NoScalars, Scalars
from espalier.wire.plan import cut_into_parts

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
"""A hexadecimal SHA-256."""


MOST_WINDOWS = 1_000_000
"""Calibration windows that a client may report, whatever a run asks for: a site may draw more or fewer."""


class PartRequest(Scalars):
    """Which blobs of an earlier reply the server asks for, in order of their names."""

    blob_sha256: list[Sha256] = Field(min_length=1)


class Report(Scalars):
    """What a client reports beside its blobs, whatever the method."""

    seconds: float = Field(ge=0, le=MOST_SECONDS)
    blob_sha256: list[Sha256]
    """Hash of every blob of the reply, in order, so that later parts can be asked for by hash."""


@dataclass(frozen=True)
class Reply:
    """What the reply to a ``train`` is made of, and what is checked of both directions; all parts follow from it."""

    order: type[Scalars]
    """Scalars of ``train``."""
    part_order: type[PartRequest]
    """Scalars of ``fetch``."""
    report: type[Report]
    """Scalars of the reply to ``train``; those of later parts have none."""
    specs: BlockSpecs
    """Tensors of all blobs, in the order of the report's hashes."""
    parts: Sequence[Sequence[str]]
    """Keys of each part's blobs."""
    observer: str
    """What somebody who reads the first part learns."""
    more: str
    """The same of a later part."""
    brought: BlockSpecs = field(default_factory=dict)
    """Tensors that come with ``train``."""
    fetched_with: BlockSpecs = field(default_factory=dict)
    """Tensors that come with ``fetch``: what says of which shapes the parts are."""
    check_brought: CheckValues | None = None
    """Of what comes with either."""
    check_values: CheckValues | None = None
    check_order: Callable[[Scalars], None] | None = None
    """Of the scalars that go down, with ``train`` or ``fetch``."""
    check_report: Callable[[Scalars], None] | None = None
    """Of the report; of a later part, of what asked for it."""

    def contract(self, request: Letter, method: str) -> Contract:
        """The contract of a ``train`` message (part 0) or of a ``fetch`` of a later part.

        Raises
        ------
        Mistake
            There is no such part.
        """
        header = request.header
        fetched = request.header.kind == "fetch"
        if header.part >= len(self.parts) or (header.part > 0) != fetched:
            raise Mistake(
                f"message: part {header.part} of a {header.kind} does not exist, a reply has"
                f" {len(self.parts)}"
            )
        part = self.parts[header.part]

        def check_down(asked: Scalars) -> None:
            if isinstance(asked, PartRequest) and len(asked.blob_sha256) != len(part):
                raise Mistake(
                    f"{type(asked).__name__}: {len(asked.blob_sha256)} hashes for {len(part)} blobs"
                )
            if self.check_order is not None:
                self.check_order(asked)

        def check_up(told: Scalars) -> None:
            if isinstance(told, Report) and len(told.blob_sha256) != len(self.specs):
                raise Mistake(
                    f"{type(told).__name__}: {len(told.blob_sha256)} hashes for {len(self.specs)}"
                    " blobs"
                )
            if self.check_report is not None:
                self.check_report(told)

        brought = self.fetched_with if fetched else self.brought
        return Contract(
            kind=header.kind,
            method=method,
            num_parts=len(self.parts),
            down=Side(
                self.part_order if fetched else self.order, brought, self.check_brought, check_down
            ),
            up=Side(
                NoScalars if fetched else self.report,
                {key: self.specs[key] for key in part},
                self.check_values,
                check_up,
                hashes_of_part(request, self.specs, part),
            ),
            observer=self.more if fetched else self.observer,
        )


@dataclass(frozen=True)
class Delivery:
    """What the server brings by ``deliver``, part by part, before a round or after the last; each part has its contract."""

    order: type[Scalars]
    """Scalars of every part."""
    specs: BlockSpecs
    """Tensors of all blobs."""
    parts: Sequence[Sequence[str]]
    """Keys of each part's blobs."""
    observer: str
    """What somebody who reads the client's answer learns."""
    check_values: CheckValues | None = None
    check_order: Callable[[Scalars], None] | None = None
    first: int = 0
    """Number of the first part; those below it are other messages."""
    beside: BlockSpecs = field(default_factory=dict)
    """Tensors that come with every part."""

    def contract(self, request: Letter, method: str) -> Contract:
        """The contract of one part.

        Raises
        ------
        Mistake
            There is no such part.
        """
        part = request.header.part - self.first
        if not 0 <= part < len(self.parts):
            raise Mistake(
                f"message: part {request.header.part} of a deliver does not exist, there are"
                f" {len(self.parts)}"
            )
        blobs = {key: self.specs[key] for key in self.parts[part]} | dict(self.beside)
        down = Side(self.order, blobs, self.check_values, self.check_order)
        return Contract("deliver", method, down, Side(NoScalars), self.observer)


def require_result_wanted(run: RunSettings) -> None:
    """Refuse to deliver a result that nobody evaluates.

    Raises
    ------
    Mistake
        ``evaluation.own-text`` is off.
    """
    if not run.evaluation.own_text:
        raise Mistake("message: a result is delivered, but evaluation.own-text is off")


def parts_of(specs: BlockSpecs, part_bytes: int) -> list[list[str]]:
    """Keys of the blobs of each part, in order, none of more than ``part_bytes`` unless a single blob is."""
    keys = list(specs)
    sizes = [sum(spec.num_bytes for spec in specs[key].values()) for key in keys]
    return [[keys[place] for place in part] for part in cut_into_parts(sizes, part_bytes)]


def hashes_of_part(
    request: Letter, reply: Iterable[str], part: Iterable[str]
) -> Callable[[Scalars], Mapping[str, str]]:
    """What the blobs of a part must have as SHA-256, by key, given the scalars that came with them.

    A report also names those of later parts, which are compared when these are fetched.

    Parameters
    ----------
    request : a ``train``, whose report names the hashes of the whole reply, or a ``fetch``, which names those of its part
    reply : keys of all blobs of the reply, in the order of the report
    part : keys of the part's blobs
    """
    fetched = request.header.kind == "fetch"
    keys = sorted(part) if fetched else list(reply)

    def named(scalars: Scalars) -> dict[str, str]:
        hashes = (request.scalars if fetched else scalars.model_dump()).get("blob_sha256", [])
        if len(hashes) != len(keys):
            raise Mistake(f"{request.header.kind}: {len(hashes)} hashes for {len(keys)} blobs")
        return dict(zip(keys, hashes, strict=True))

    return named
