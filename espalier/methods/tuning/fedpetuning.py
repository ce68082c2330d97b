"""FedPETuning: settings and contracts, also those of all methods that average LoRA adapters.

Clients send adapter tensors and a few counts, nothing else.

Before the first round only the request is sent, since every client makes the first adapters from
the run's seed. Later the global adapters are sent: ``deliver`` pushes all parts but the last, and
``train`` brings the last.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from espalier.errors import EspalierError, ProtocolError
from espalier.messages.contract import BlockSpecs, CheckValues, Contract
from espalier.messages.message import Fields, Kind, MessageBody, validate
from espalier.messages.parts import (
    Delivery,
    PartRequest,
    Reply,
    Report,
    require_result_wanted,
    require_samples,
    require_some_steps,
)
from espalier.messages.sums.summands import SumSpec, SumSpecs
from espalier.messages.sums.summed_weights import most_weight, weight_specs
from espalier.messages.tensor_blobs import TensorSpec, wire_specs
from espalier.models.adapters import FACTORS, AdapterPlan, Bases, adapter_plan
from espalier.models.plan import ModelPlan, PlanOf, cut_into_parts
from espalier.settings.method import MethodSettings
from espalier.settings.run import RunSettings
from espalier.settings.tables.federation import BY_COORDINATE, FederationSettings
from espalier.settings.tables.lora import LoraSettings
from espalier.settings.tables.task import TEXT
from pruning_kernels.bounded_fixed_point import Scale, fraction_that_fits, signed_bits

if TYPE_CHECKING:
    from torch import Tensor


class AdapterAveraging(MethodSettings):
    """Settings and properties shared by all methods that average adapters."""

    FEDERATION: ClassVar[tuple[str, ...]] = (
        "rounds", "sampled-clients", "client-weights", "max-weight-ratio", "aggregation-rule", "trimmed-clients",
        "max-update-ratio", "wire-dtype",
    )  # fmt: skip
    ROUNDS = 3
    WEIGHTS: ClassVar[tuple[str, ...]] = ("samples", "equal")
    RULES: ClassVar[tuple[str, ...]] = ("clipped-mean", "mean", "trimmed-mean", "median")
    FIRST_DELIVERY = 2
    """First round with a ``deliver`` message; clients make the first adapters from the seed."""

    def asked_of_sites(self, run: RunSettings) -> Mapping[str, tuple[str, int]]:
        """Return the steps and sequences of a round and the tokens of a forward pass."""
        training = run.training
        tokens = run.data.sequence_length if run.task.name == TEXT else run.task.max_tokens
        passes = training.steps * training.accumulation
        return {
            "max_batch_tokens": (
                "training.batch-size x tokens of a sequence",
                training.batch_size * tokens,
            ),
            "max_steps": ("training.steps x training.accumulation", passes),
        }

    @property
    def has_local_baseline(self) -> bool:
        """True: the local baseline trains for as many steps as all rounds together."""
        return True

    def contradictions(
        self, method: str, federation: FederationSettings, lora: LoraSettings, num_clients: int
    ) -> list[str]:
        """Return an error line for a rule by coordinate with updates B A.

        Their coordinates would be those of the dense product, which is never computed.
        """
        lines = super().contradictions(method, federation, lora, num_clients)
        rule = federation.aggregation_rule
        if self.averages_updates and rule in BY_COORDINATE and rule in self.RULES:
            lines.append(
                f"federation.aggregation-rule = '{rule}': with {method}.aggregation = 'svd' the"
                " updates B A are averaged, and their coordinates are those of the dense matrix,"
                " which the server never computes; set aggregation to 'factors', or the rule to"
                " 'clipped-mean'"
            )
        return lines

    @property
    def averages_updates(self) -> bool:
        """True if the updates B A are averaged, and not A and B separately.

        An SVD then gives the best approximation of the mean for the adapters' rank.
        """
        return False

    @property
    def averaged(self) -> str:
        """Word for what is averaged, for a run's description."""
        return "updates" if self.averages_updates else "factors"

    @property
    def bases(self) -> Bases:
        """Kind of the frozen factors if only the matrix between them is trained, else empty."""
        return ""

    @property
    def sent_factors(self) -> tuple[str, ...]:
        """Factors that the server sends; clients make the others from the run's seed."""
        return FACTORS

    def trained_factors(self, server_round: int) -> tuple[str, ...]:
        """Return the factors that clients train and send in a round."""
        return self.sent_factors

    def rank_folded_by(self, run: RunSettings) -> int:
        """Return by how much a round raises the rank of the updates folded into the base."""
        return 0

    def adapter_seed(self, seed: int, server_round: int) -> int:
        """Return the seed of the initial adapters of a round, which is the same in all rounds."""
        return seed

    @property
    def lowers_ranks(self) -> bool:
        """True if a client may continue with a lower rank than the server asked for."""
        return False

    @property
    def feeds_back(self) -> bool:
        """Return whether the loss of rounding is added the next time (error feedback).

        It is False with the SVD: A and B get other directions in every round, so a loss of the
        previous round has no meaning in them.
        """
        return not self.averages_updates

    def secure_sum_fault(self, federation: FederationSettings) -> str:
        """Return which settings need single replies; empty if none do."""
        if federation.sends_differences:
            return (
                f"federation.wire-dtype = '{federation.wire_dtype}' rounds each client's adapters"
                " before they are summed, and saves no bytes then; set it to 'float32'"
            )
        return ""

    def delivers_differences(self, federation: FederationSettings) -> bool:
        """Return whether the server sends the change of the global adapters since the first ones.

        Every client makes the first adapters itself. With the SVD nothing of these is left in the
        factors, which are smaller than the difference and are sent themselves.
        """
        return federation.sends_differences and not self.averages_updates

    def lora_of(self, lora: LoraSettings, num_blocks: int) -> LoraSettings:
        """Return the LoRA settings that clients train in a model with ``num_blocks`` blocks."""
        return lora

    @property
    def limits_differ(self) -> bool:
        """True if the server may ask clients to train adapters of lower ranks."""
        return False

    def rank_limit_of(self, client: int, lora: LoraSettings) -> int:
        """Return the largest rank of a client's adapters; here it is the same for all clients."""
        return lora.rank


def folding_faults(given: str, federation: FederationSettings, lora: LoraSettings) -> list[str]:
    """Return an error line for each setting with which no update is folded into the base.

    ``given`` names the key and the value that fold it.
    """
    lines = []
    if federation.sends_differences:
        lines.append(
            f"federation.wire-dtype = '{federation.wire_dtype}': {given} sums updates exactly,"
            " and this would round them; set it to 'float32'"
        )
    if lora.keep_zeros:
        lines.append(
            f"lora.keep-zeros = true: {given} folds updates into the base, which would fill its"
            " zeros; set it to false"
        )
    return lines


class FedPETuningSettings(AdapterAveraging):
    """Table ``[fedpetuning]`` (Zhang et al. 2023, "FedPETuning")."""

    FEDERATION: ClassVar[tuple[str, ...]] = (*AdapterAveraging.FEDERATION, "fleet", "secure-sum")
    PRUNES = False
    MECHANISM = "dp-sgd"

    aggregation: Literal["factors", "svd", "fedex", "ffa", "rolora"] = Field(
        "factors",
        description=(
            "`factors`: mean of A and mean of B, as in the paper; `svd`: best approximation of the"
            " mean of the updates B A; `fedex` (FedEx-LoRA): as `factors`, and what the mean of the"
            " updates B A has beyond it is folded into the base; `ffa` (FFA-LoRA): A keeps its initial values, and only B is"
            " trained and sent; `rolora` (RoLoRA): clients train and send B in odd rounds and A in"
            " even rounds. With `fedex`, `ffa` and `rolora` the mean is exactly that of the updates"
            " B A."
        ),
    )

    @property
    def sent_factors(self) -> tuple[str, ...]:
        """Factors that the server sends; clients make the others from the run's seed."""
        return ("lora_b",) if self.aggregation == "ffa" else FACTORS

    def trained_factors(self, server_round: int) -> tuple[str, ...]:
        """Return the factors that clients train and send in a round."""
        if self.aggregation == "rolora":
            return ("lora_b",) if server_round % 2 else ("lora_a",)
        return self.sent_factors

    def rank_folded_by(self, run: RunSettings) -> int:
        """Return by how much a round raises the rank of the updates folded into the base.

        The residual of k clients has the rank (k - 1) r.
        """
        if self.aggregation != "fedex":
            return 0
        return (run.federation.clients_of_round(run.num_clients) - 1) * run.lora.rank

    def contradictions(
        self, method: str, federation: FederationSettings, lora: LoraSettings, num_clients: int
    ) -> list[str]:
        """Return one error line per conflict between these tables."""
        lines = super().contradictions(method, federation, lora, num_clients)
        if self.aggregation == "fedex":
            given = "fedpetuning.aggregation = 'fedex'"
            lines += folding_faults(given, federation, lora)
            if federation.aggregation_rule in BY_COORDINATE:
                lines.append(
                    f"federation.aggregation-rule = '{federation.aggregation_rule}': {given}"
                    " averages the updates B A, and their coordinates are those of the dense"
                    " matrix, which the server never computes; set the rule to 'clipped-mean'"
                )
        return lines

    @property
    def averages_updates(self) -> bool:
        """True if the updates B A are averaged, and not A and B separately."""
        return self.aggregation == "svd"

    @property
    def averaged(self) -> str:
        """Word for what is averaged, for a run's description."""
        words = {
            "fedex": "factors, with the residual of the updates,",
            "ffa": "only B trained and",
            "rolora": "B and A trained in turn and",
        }
        return words.get(self.aggregation, super().averaged)

    def secure_sum_fault(self, federation: FederationSettings) -> str:
        """Return which settings need single replies; empty if none do."""
        if self.aggregation in ("svd", "fedex"):
            return (
                f"fedpetuning.aggregation = '{self.aggregation}' averages the products B A, which do"
                " not follow from the sums of A and of B; set it to 'factors', 'ffa' or 'rolora'"
            )
        return super().secure_sum_fault(federation)


VALUE_EXPONENT = 6
"""Trained values are clipped to 2^6 as summands; LoRA's are of the order of 0.01 to 1."""
MAX_FRACTION_BITS = 32
"""Maximum number of bits after the point of a trained value as a summand."""
MAX_SAMPLES = 1_000_000_000
"""Maximum number of training sequences that a client may report; they are its weight in a mean."""


class Order(Fields):
    """Fields of a request to train."""

    rank_limit: int = Field(ge=1)
    """Maximum rank of the adapters that the client trains."""


class PartOrder(PartRequest):
    """Fields of a request for blobs of an earlier reply."""

    rank_limit: int = Field(ge=1)
    """Maximum rank of the adapters that the client trains."""
    rank: int = Field(ge=1)
    """Rank that the client reported; in its blobs, rows and columns beyond it are zero."""


class TuningReport(Report):
    """Fields of a reply with adapters."""

    samples: int = Field(ge=0, le=MAX_SAMPLES)
    """Number of training sequences if it is the client's weight in the mean; else 0.

    All sequences of the client count, even if the round did not use all of them.
    """
    skipped_steps: int = Field(ge=0)
    """Number of steps that were skipped because their loss or gradient was not finite."""
    rank: int = Field(ge=1)
    """Largest rank of the client's adapters after the round.

    It is the ``rank_limit`` of the request, or a lower rank with self-pruning. Rows and columns
    beyond it are zero.
    """


def trained(plan: ModelPlan, run: RunSettings, rank_limit: int | None = None) -> AdapterPlan:
    """Return the tensors that the run trains, or those of a client with this rank limit."""
    job = run.of(AdapterAveraging)
    lora = job.lora_of(run.lora, len(plan.blocks))
    adapters = replace(
        adapter_plan(plan, lora, run.num_classes), factors=job.sent_factors, bases=job.bases
    )
    return adapters if rank_limit is None else adapters.limited(rank_limit)


def of_round(adapters: AdapterPlan, run: RunSettings, server_round: int) -> AdapterPlan:
    """Return these adapters with the factors that clients train and send in a round."""
    return adapters.with_factors(run.of(AdapterAveraging).trained_factors(server_round))


def of_all_rounds(adapters: AdapterPlan, run: RunSettings) -> AdapterPlan:
    """Return these adapters with all factors that are trained in any round."""
    first, second = (run.of(AdapterAveraging).trained_factors(number) for number in (1, 2))
    return adapters.with_factors(tuple(name for name in FACTORS if name in first + second))


def before_round(adapters: AdapterPlan, run: RunSettings, server_round: int) -> AdapterPlan:
    """Return these adapters with the tensors that the server sends before a round."""
    job = run.of(AdapterAveraging)
    return adapters.with_factors(job.sent_factors, (server_round - 1) * job.rank_folded_by(run))


def summands(server_round: int, plan: ModelPlan, run: RunSettings) -> SumSpecs:
    """Return the specs of a reply's weighted adapters as summands, and of the weight."""
    return value_specs(of_round(trained(plan, run), run, server_round), run)


def value_scale(run: RunSettings) -> Scale:
    """Return the fixed point of trained values as summands, with at most 64 bits of a sum."""
    most = most_weight(run)
    fraction = fraction_that_fits(VALUE_EXPONENT, run.num_clients, most, MAX_FRACTION_BITS)
    return Scale(VALUE_EXPONENT, fraction)


def value_specs(adapters: AdapterPlan, run: RunSettings) -> SumSpecs:
    """Return the specs of some tensors' weighted values as summands, and of the weight."""
    scale = value_scale(run)
    bits = signed_bits(scale.exponent + scale.fraction_bits, run.num_clients, most_weight(run))
    specs = {
        key: {name: SumSpec(math.prod(shape), bits) for name, shape in shapes.items()}
        for key, shapes in adapters.shapes().items()
    }
    return {**specs, **weight_specs(run)}


Trained = Callable[[ModelPlan, RunSettings, int], AdapterPlan]
"""Function that returns the tensors that a method trains, given a rank limit."""

OBSERVER = (
    "Adapters trained on this client's data. Their difference from the adapters that were sent to"
    " it is the sum of the optimiser's steps of one round. With one step this tells nearly as much"
    " as the gradient of the sequences, from which training text can be recovered in part. More"
    " tokens (the site's `min-tokens`) and more steps make this harder, not impossible. Whoever"
    " knows one of the sequences can recognise that it was used for training, whatever"
    " `min-tokens` says. The server chooses the initial adapters, and so it influences what it"
    " learns. With `client-weights` = `samples` only: the number of training sequences. Also the"
    " client's next rank, how many steps failed, and how long the training took."
)
"""Observer sentence of the contract of ``train``."""
PRIVATE_OBSERVER = (
    "Adapters trained on this client's data by DP-SGD: every record's or group's gradient is clipped"
    " and Gaussian noise is added to their sum. Whoever reads all replies of the client in this run"
    " learns of any one record or group no more than `privacy.epsilon` and `privacy.delta` allow, if"
    " `privacy.noise` is `secure`."
)
"""Observer sentence of ``train`` in a private run."""


@dataclass(frozen=True)
class Along:
    """Blobs that some methods add to every request."""

    specs: BlockSpecs = field(default_factory=dict)
    """Specs of these blobs."""
    check: CheckValues = lambda key, blob: None
    """Check of the values of these blobs."""


NOTHING = Along()


def blob_specs(adapters: AdapterPlan, run: RunSettings) -> dict[str, Mapping[str, TensorSpec]]:
    """Return the specs of the blobs with all adapters, in order."""
    return {
        key: wire_specs(shapes, run.federation.wire_dtype)
        for key, shapes in adapters.shapes().items()
    }


def parts(adapters: AdapterPlan, run: RunSettings, server_round: int = 1) -> list[list[str]]:
    """Return the blob keys of each part of a round; both directions have the same parts.

    A blob counts with its larger size.
    """
    ways = [blob_specs(before_round(adapters, run, server_round), run)]
    ways.append(blob_specs(of_round(adapters, run, server_round), run))
    sizes = [
        max(sum(spec.num_bytes for spec in specs[key].values()) for specs in ways)
        for key in ways[0]
    ]
    keys = list(ways[0])
    return [[keys[place] for place in part] for part in cut_into_parts(sizes, run.part_bytes)]


def contract(
    request: MessageBody,
    plan_of: PlanOf,
    run: RunSettings,
    kind_of_order: type[Order] = Order,
    trained: Trained = trained,
    kind_of_report: type[TuningReport] = TuningReport,
    beside: Along = NOTHING,
    observer: str = OBSERVER,
) -> Contract:
    """Return the contract of a ``train`` message (part 0), or of a ``fetch`` of a later part.

    Parameters
    ----------
    kind_of_order : fields of ``train``
    trained : function that returns the trained tensors
    kind_of_report : fields of the reply
    beside : blobs that every request includes
    observer : what a person who reads the reply to ``train`` learns

    Raises
    ------
    ProtocolError
        If the rank limit exceeds the largest rank of the settings, or if there is no such part.
    """
    fetches = request.header.kind == "fetch"
    kind: type[Order | PartOrder] = PartOrder if fetches else kind_of_order
    order = validate(kind, request.fields)
    _require_rank(order.rank_limit, run)
    adapters = trained(plan_of(), run, order.rank_limit)
    sent = of_round(adapters, run, request.header.server_round)
    received = before_round(adapters, run, request.header.server_round)
    own_parts = parts(adapters, run, request.header.server_round)
    specs = blob_specs(received, run)
    last = {key: specs[key] for key in own_parts[-1]}
    # Two instances, since the ranks of the request must not count for the reply.
    arrived = Values(received, run)
    values = Values(sent, run)

    def fits(report: Fields) -> None:
        if isinstance(report, TuningReport):
            _require_report(report, order.rank_limit, run)
        # A later part has no report; the rank is then that of the request for the part.
        told = report if isinstance(report, TuningReport) else order
        if not isinstance(told, Order):
            values.require_rank(told.rank)

    reply = Reply(
        order=kind_of_order,
        part_order=PartOrder,
        report=kind_of_report,
        specs=blob_specs(sent, run),
        parts=own_parts,
        observer=PRIVATE_OBSERVER if run.privacy.on else observer,
        more="Further adapter tensors, as in train.",
        brought=last | dict(beside.specs) if request.header.server_round > 1 else {},
        fetched_with=beside.specs,
        check_brought=_either(beside, arrived.check),
        check_values=values.check,
        check_report=fits,
    )
    return reply.contract(request, run)


def largest_orders(
    plan: ModelPlan | None, run: RunSettings, server_round: int
) -> dict[Kind, dict[str, Any]]:
    """Return the fields of the requests with the largest replies of a round, by kind.

    A client then trains all ranks.
    """
    return {"train": {"rank_limit": run.lora.rank}}


def sizes_vary(run: RunSettings) -> bool:
    """Return True if clients may have different ranks."""
    return run.of(AdapterAveraging).limits_differ


def delivery(request: MessageBody, plan_of: PlanOf, run: RunSettings) -> Contract:
    """Return the contract of a ``deliver`` message, which pushes a part of the global adapters."""
    if request.header.server_round > run.federation.rounds:
        require_result_wanted(run)
    return delivery_of(request, plan_of, run, trained)


def delivery_of(
    request: MessageBody,
    plan_of: PlanOf,
    run: RunSettings,
    trained: Trained,
    beside: Along = NOTHING,
    first: int = 0,
) -> Contract:
    """Return the contract of ``delivery`` for a method with other tensors or blobs.

    It is also the contract of a pushed result.

    Parameters
    ----------
    trained : function that returns the trained tensors
    beside : blobs that every request includes
    first : number of the first part

    Raises
    ------
    ProtocolError
        If the rank limit exceeds the largest rank of the settings, or if there is no such part.
    """
    order = validate(Order, request.fields)
    _require_rank(order.rank_limit, run)
    whole = trained(plan_of(), run, order.rank_limit)
    adapters = before_round(whole, run, request.header.server_round)
    delivery = Delivery(
        order=Order,
        specs=blob_specs(adapters, run),
        parts=parts(whole, run, request.header.server_round),
        observer="That a part of the global adapters arrived, and nothing else.",
        check_values=_either(beside, Values(adapters, run).check),
        first=first,
        beside=beside.specs,
    )
    return delivery.contract(request, run)


def _either(beside: Along, otherwise: CheckValues) -> CheckValues:
    """Return a check that applies ``beside.check`` to its blobs and ``otherwise`` to all others."""
    return lambda key, blob: (
        beside.check(key, blob) if key in beside.specs else otherwise(key, blob)
    )


def _require_rank(rank_limit: int, run: RunSettings) -> None:
    """Check that the rank limit does not exceed the largest rank of the settings."""
    if rank_limit > run.lora.rank:
        raise ProtocolError(
            f"message: rank_limit is above {run.lora.rank}, the largest rank of [lora]"
        )


def _require_report(report: TuningReport, rank_limit: int, run: RunSettings) -> None:
    if report.rank > rank_limit:
        raise ProtocolError(f"TuningReport: rank is above {rank_limit}, the order's rank_limit")
    if report.rank < rank_limit and not run.of(AdapterAveraging).lowers_ranks:
        raise ProtocolError(
            f"TuningReport: rank is below {rank_limit}, the order's rank_limit, and no client gives"
            " up ranks here"
        )
    require_samples("TuningReport: samples", report.samples, run)
    require_some_steps("TuningReport", report.skipped_steps, run.training.steps)


class Values:
    """Check of the values of a message's blobs, one by one, and then of their largest rank."""

    def __init__(self, adapters: AdapterPlan, run: RunSettings) -> None:
        self._shapes = adapters.shapes()
        self._wire_dtype = run.federation.wire_dtype
        self._rank_in_use = 0

    def check(self, key: str, blob: bytes) -> "Mapping[str, Tensor]":
        """Check that the numbers of a blob can be read and are finite, and note the rank in use.

        Returns
        -------
        Mapping of str to Tensor
            Tensors of the blob, float32, by canonical name.

        Raises
        ------
        ProtocolError
            If they are not.
        """
        from espalier.messages.blobs.adapters import unpack_adapters

        try:
            tensors = unpack_adapters(self._shapes[key], blob, self._wire_dtype)
        except EspalierError as error:
            raise ProtocolError(f"{key} {error}") from None
        self._rank_in_use = max(self._rank_in_use, rank_in_use(tensors))
        return tensors

    def require_rank(self, rank: int) -> None:
        """Check that rows and columns beyond ``rank`` are zero in all blobs checked before.

        Raises
        ------
        ProtocolError
            If they are not.
        """
        if self._rank_in_use > rank:
            raise ProtocolError(f"blobs: not zero beyond rank {rank}, which the client reports")


def rank_in_use(tensors: "Mapping[str, Tensor]") -> int:
    """Return the number of rows of A, or columns of B, up to the last one that is not zero.

    Parameters
    ----------
    tensors : adapter tensors by canonical name; the largest number of all tensors counts
    """
    largest = 0
    for name, tensor in tensors.items():
        if name.endswith((".lora_a", ".lora_b")):
            used = (tensor != 0).any(dim=1 if name.endswith(".lora_a") else 0).nonzero()
            largest = max(largest, int(used.max()) + 1 if len(used) else 0)
    return largest


EXAMPLES: dict[Kind, dict[str, Any]] = {
    "train": {"rank_limit": 8},
    "fetch": {"rank_limit": 8, "rank": 8},
    "deliver": {"rank_limit": 8},
    "alone": {"rank_limit": 4},
}
"""Example fields for a model of two blocks by kind; the contract of the kind depends on them."""
