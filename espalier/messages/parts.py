"""Transfer in parts of data that may be too large for a message.

Both directions and all methods use it. The reply to a ``train`` has the first part, and each
``fetch`` requests a later one by hash. The contracts check the number of parts, the blobs of each
part, and that every blob has the hash that the report named. ``push`` brings a result part by
part.

Covers: a client works for no round beyond those of the run, for all methods and kinds of messages.
Does not cover: additional rounds of FedSpaLLM. A site cannot know if they are needed; its
``max-rounds`` limits them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from espalier.errors import ProtocolError
from espalier.messages.contract import BlockSpecs, CheckValues, Contract, Side
from espalier.messages.message import MAX_SECONDS, Fields, Header, MessageBody, NoFields
from espalier.messages.tensor_blobs import views
from espalier.models.plan import ModelPlan, PlanOf, cut_into_parts
from espalier.settings.run import RunSettings

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
"""Hexadecimal SHA-256."""


MAX_SAMPLES = 1_000_000
"""Maximum number of calibration samples that a client may report.

It does not depend on the run's settings, because a site may use more or fewer samples.
"""


class PartRequest(Fields):
    """Fields of a request for blobs of an earlier reply."""

    blob_sha256: list[Sha256] = Field(min_length=1)
    """Hashes of the blobs, in the order of their keys."""


class Report(Fields):
    """Fields of the first part of a reply, for all methods."""

    seconds: float = Field(ge=0, le=MAX_SECONDS)
    """Duration of the work in seconds."""
    blob_sha256: list[Sha256]
    """Hash of every blob of the reply, in order, by which later parts are requested."""


@dataclass(frozen=True)
class Reply:
    """Description of the reply to a ``train``, from which the contracts of all its parts follow."""

    specs: BlockSpecs
    """Tensor specs of all blobs, in the order of the hashes in the report."""
    observer: str
    """Description of what a person who reads the first part learns."""
    more: str = "the same of further blocks, as in train"
    """Description of what a person who reads a later part learns."""
    order: type[Fields] = NoFields
    """Fields of ``train``."""
    part_order: type[PartRequest] = PartRequest
    """Fields of ``fetch``."""
    report: type[Report] = Report
    """Fields of the reply to ``train``; later parts have none."""
    request_blobs: BlockSpecs = field(default_factory=dict)
    """Specs of the blobs of a ``train`` request."""
    fetched_with: BlockSpecs = field(default_factory=dict)
    """Specs of the blobs of a ``fetch`` request, which determine the shapes of the parts."""
    check_request: CheckValues | None = None
    """Check of the values of a request's blobs."""
    check_values: CheckValues | None = None
    """Check of the values of a reply's blobs."""
    check_order: Callable[[Any], None] | None = None
    """Check of the fields of a ``train`` request."""
    check_report: Callable[[Any], None] | None = None
    """Check of the fields of the reply to ``train``."""
    check_part: Callable[[NoFields], None] | None = None
    """Check of a later part, after its blobs."""
    parts: list[list[str]] | None = None
    """Blob keys of each part; None: as many blobs per part as ``part-bytes`` allows."""

    def contract(self, request: MessageBody, run: RunSettings) -> Contract:
        """Return the contract of a ``train`` message (part 0), or of a ``fetch`` of a later part.

        Raises
        ------
        ProtocolError
            If there is no such part.
        """
        header = request.header
        is_fetch = request.header.kind == "fetch"
        parts = parts_of(self.specs, run.part_bytes) if self.parts is None else self.parts
        if header.part >= len(parts) or (header.part > 0) != is_fetch:
            raise ProtocolError(
                f"message: part {header.part} of a {header.kind} does not exist, a reply has"
                f" {len(parts)}"
            )
        part = parts[header.part]

        def has_all_hashes(order: PartRequest) -> None:
            if len(order.blob_sha256) != len(part):
                raise ProtocolError(
                    f"{type(order).__name__}: {len(order.blob_sha256)} hashes for {len(part)} blobs"
                )

        return Contract(
            kind=header.kind,
            method=run.method,
            parts=parts,
            down=Side(
                self.part_order if is_fetch else self.order,
                self.fetched_with if is_fetch else self.request_blobs,
                self.check_request,
                has_all_hashes if is_fetch else self.check_order,
            ),
            up=Side(
                NoFields if is_fetch else self.report,
                {key: self.specs[key] for key in part},
                self.check_values,
                self.check_part if is_fetch else self.check_report,
                hashes_of_part(request, self.specs, part),
            ),
            observer=self.more if is_fetch else self.observer,
        )


@dataclass(frozen=True)
class Push:
    """Description of data that the server pushes before a round or after the last.

    Each part has a contract of its own.
    """

    specs: BlockSpecs
    """Tensor specs of all blobs."""
    observer: str = (
        "That the federated result arrived, and nothing else. It is sent with"
        " `evaluation.own-text`."
    )
    """Description of what a person who reads the client's answer learns."""
    order: type[Fields] = NoFields
    """Fields of every part."""
    parts: Sequence[Sequence[str]] | None = None
    """Blob keys of each part; None: as many blobs per part as ``part-bytes`` allows."""
    check_values: CheckValues | None = None
    """Check of the values of each blob."""
    check_order: Callable[[Any], None] | None = None
    """Check of the fields of each part."""
    first: int = 0
    """Number of the first part; lower numbers belong to other messages."""
    extra: BlockSpecs = field(default_factory=dict)
    """Specs of blobs that every part includes."""

    def contract(self, request: MessageBody, run: RunSettings) -> Contract:
        """Return the contract of one part.

        Raises
        ------
        ProtocolError
            If there is no such part.
        """
        part = request.header.part - self.first
        parts = parts_of(self.specs, run.part_bytes) if self.parts is None else self.parts
        if not 0 <= part < len(parts):
            raise ProtocolError(
                f"message: part {request.header.part} of a push does not exist, there are"
                f" {len(parts)}"
            )
        blobs = {key: self.specs[key] for key in parts[part]} | dict(self.extra)
        down = Side(self.order, blobs, self.check_values, self.check_order)
        return Contract("push", run.method, down, Side(NoFields), self.observer, pushed=parts)


def values_within(most: float) -> CheckValues:
    """Return a check that no value of a blob is NaN or has a magnitude above ``most``.

    It does not fit tensors in bfloat16, of which NumPy reads the bits.
    """

    def check(key: str, blob: bytes) -> None:
        for name, values in views(blob).items():
            if not (np.abs(values) <= most).all():
                raise ProtocolError(f"{key} {name}: a number is not finite, or beyond {most:g}")

    return check


def reports_samples(run: RunSettings) -> bool:
    """Return whether a client's report tells its number of samples, for its weight.

    In a secure sum the weight is a summand too, and the report does not tell it.
    """
    return run.federation.weighs_samples and not run.federation.secure_sum


def require_samples(name: str, samples: int, run: RunSettings) -> None:
    """Check that a client tells its number of samples if ``reports_samples``, and only then.

    Raises
    ------
    ProtocolError
        If it is not so; the error begins with ``name``, the report and its field.
    """
    if (samples > 0) != reports_samples(run):
        raise ProtocolError(
            f"{name} are sent only with federation.client-weights = 'samples' (or"
            " 'importance-samples') and without federation.secure-sum"
        )


def require_some_steps(name: str, skipped: int, steps: int) -> None:
    """Check that not all steps of a round were skipped; an error begins with the report's name."""
    if skipped >= steps:
        raise ProtocolError(f"{name}: skipped_steps must be below the {steps} steps of a round")


def require_tokens(name: str, tokens: int, run: RunSettings) -> None:
    """Check that a client's samples can have this number of tokens.

    Raises
    ------
    ProtocolError
        If no client has as many; the error begins with the report's name.
    """
    max_tokens = MAX_SAMPLES * run.data.sequence_length
    if tokens > max_tokens:
        raise ProtocolError(f"{name}: {tokens} tokens, no client has more than {max_tokens}")


MakeContract = Callable[[MessageBody, PlanOf, RunSettings], Contract]
"""Function of a request, of a function that returns the plan, and of the settings."""


def contracts_of(
    reply: Callable[[ModelPlan, RunSettings], Reply],
) -> tuple[MakeContract, MakeContract]:
    """Return ``contract`` and ``push_contract`` of a method whose result has a reply's tensors.

    The result is pushed to clients that evaluate it on their own text.
    """

    def contract(request: MessageBody, plan_of: PlanOf, run: RunSettings) -> Contract:
        return reply(plan_of(), run).contract(request, run)

    def push_contract(request: MessageBody, plan_of: PlanOf, run: RunSettings) -> Contract:
        require_result_wanted(run)
        train_reply = reply(plan_of(), run)
        return Push(train_reply.specs, check_values=train_reply.check_values).contract(request, run)

    return contract, push_contract


def require_result_wanted(run: RunSettings) -> None:
    """Check that the clients of the run evaluate its result.

    Raises
    ------
    ProtocolError
        If ``evaluation.own-text`` is off.
    """
    if not run.evaluation.own_text:
        raise ProtocolError("message: a result is pushed, but evaluation.own-text is off")


def parts_of(specs: BlockSpecs, part_bytes: int) -> list[list[str]]:
    """Split blobs into parts of at most ``part_bytes``, in order, and return the keys of each part.

    A larger blob is a part of its own.
    """
    keys = list(specs)
    sizes = [sum(spec.num_bytes for spec in specs[key].values()) for key in keys]
    return [[keys[index] for index in part] for part in cut_into_parts(sizes, part_bytes)]


def hashes_of_part(
    request: MessageBody, reply: Iterable[str], part: Iterable[str]
) -> Callable[[Fields], Mapping[str, str]]:
    """Return a function of the fields of a reply that gives the SHA-256 of its blobs, by key.

    A report also names the hashes of later parts, which are compared when these are fetched.

    Parameters
    ----------
    request : a ``train``, whose report names the hashes of the whole reply, or a ``fetch``, which
        names those of its part
    reply : keys of all blobs of the reply, in the order of the report
    part : keys of the blobs of the part
    """
    is_fetch = request.header.kind == "fetch"
    # A ``fetch`` names the hashes of its part, a report those of the whole reply.
    keys = sorted(part) if is_fetch else list(reply)

    def hashes_by_key(fields: Fields) -> dict[str, str]:
        hashes = (request.fields if is_fetch else fields.model_dump()).get("blob_sha256", [])
        if len(hashes) != len(keys):
            raise ProtocolError(
                f"{type(fields).__name__}: {len(hashes)} hashes for {len(keys)} blobs"
            )
        return dict(zip(keys, hashes, strict=True))

    return hashes_by_key


def last_rounds(plan_of: PlanOf, run: RunSettings) -> range:
    """Return the rounds after which a run may end; the plan is read only if they depend on it."""
    return run.job.last_rounds(run.federation, lambda: len(plan_of().blocks), run.num_clients)


def require_round(header: Header, ends: range, run: RunSettings) -> None:
    """Check that a request of this kind exists in its round.

    Parameters
    ----------
    ends : rounds after which the run may end. They are not used for requests before the first
        round.

    Raises
    ------
    ProtocolError
        If there is no such request in this round; the error names the last round.
    """
    if header.kind in ("enrol", "refused"):
        if header.server_round != 0:
            what = "an enrol" if header.kind == "enrol" else "a refused"
            raise ProtocolError(
                f"message: {what} of round {header.server_round} does not exist, it comes before"
                " the first round"
            )
        return
    if header.kind in ("local_baseline", "evaluate"):
        allowed = ends
    elif header.kind == "push":
        # The result is pushed with the number of the round after the last one.
        allowed = range(run.job.FIRST_PUSH, ends[-1] + 2)
    else:
        allowed = range(1, ends[-1] + 1)
    if header.server_round not in allowed:
        what = (
            f"round {ends[0]}" if len(ends) == 1 else f"one of the rounds {ends[0]} to {ends[-1]}"
        )
        raise ProtocolError(
            f"message: a {header.kind} of round {header.server_round} does not exist, the run ends"
            f" with {what}"
        )
