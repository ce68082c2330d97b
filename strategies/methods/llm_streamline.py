"""LLM-Streamline, federated (Chen et al. 2025, "Streamlining Redundant Layers to Compress Large Language Models").

In the first round every client says of each stretch of neighbouring blocks how like its output is to its input (section 2.2);
the server pools the cosines over all tokens, and the stretch with the highest goes. One layer comes in its place, which begins
as the stretch's first block and learns, at each client, to do what the stretch does (section 2.3); its weights are averaged
round by round. Or nothing comes in its place.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from flwr.app import Message

from espalier.amounts import count
from espalier.modeling.opened import OpenedModel, check_labels
from espalier.modeling.structured.export import require_form
from espalier.modeling.structured.streamline import likest, require_streamlined
from espalier.settings.llm_streamline import LlmStreamlineSettings
from espalier.settings.mistakes import Mistake
from espalier.settings.run import RunSettings
from espalier.wire.adapter_payload import read_adapter
from espalier.wire.llm_streamline import (
    COSINES,
    SIMILARITY_KEY,
    LayerReport,
    Replace,
    ReplacePart,
    layer_parts,
    layer_shapes,
)
from espalier.wire.messages import NoScalars, Scalars, validate
from espalier.wire.parts import PartRequest
from pruning_kernels.clipping import SINGLE_NUMBERS, root_mean_square, within_ratio
from strategies.engine.client_weights import count_claims
from strategies.engine.evaluation import ClientEvaluation
from strategies.engine.inbox import Inbox
from strategies.engine.method import Method
from strategies.engine.roster import Seat
from strategies.engine.run import Run
from strategies.engine.update_limits import UpdateLimits
from strategies.methods.plausible_update import Reach
from strategies.results.streamlined import StreamlinedResult


class LlmStreamline(Method):
    """Pooled cosines, then an averaged layer.

    Takes what ``Method`` does.
    """

    result: StreamlinedResult
    num_rounds = 1
    SENT = "answers"

    def __init__(self, run: Run, evaluation: ClientEvaluation | None = None) -> None:
        super().__init__(run, evaluation)
        self.job = run.settings.of(LlmStreamlineSettings)
        self.federation = run.settings.federation
        self.result = StreamlinedResult(run.settings, run.model, run.checkpoint.blobs)
        self.reach = Reach(self.job.training, differences=self.federation.sends_differences)
        self.num_rounds = self.job.num_rounds(self.federation)
        self._told: dict[int, LayerReport] = {}
        self.limits = UpdateLimits(self.federation.max_update_ratio)

    @classmethod
    def require_fit(
        cls, settings: RunSettings, model: OpenedModel, capabilities: Mapping[str, float]
    ) -> None:
        """Refuse an encoder, a share that leaves no block, and a form in which the smaller model could not be written."""
        check_labels(model.family, None, str(model.directory / "config.json"))
        job = settings.of(LlmStreamlineSettings)
        blocks = len(model.plan.blocks)
        try:
            for made in require_streamlined(model, job.span(blocks), job.replacement == "layer"):
                require_form(made, job.form)
        except Mistake as mistake:
            raise Mistake(f"{settings.method}.{mistake}") from None

    def summary(self) -> None:
        """Show what will be done."""
        blocks = len(self.run.model.plan.blocks)
        place = "nothing comes in their place"
        if self.job.replacement == "layer":
            place = (
                f"one layer in their place, {count(self.federation.rounds, 'round')} of"
                f" {count(self.job.steps, 'step')}"
            )
        text = f"llm-streamline {self.result.span} of {blocks} neighbouring blocks go, {place}"
        self.run.progress.note("method", text)

    def state(self) -> dict[str, Any]:
        """The result, and how large what clients began with was."""
        return self.result.state() | {"reach": self.reach.starts}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what ``state`` returned."""
        self.result.restore(state)
        self.reach.starts = state["reach"]

    # ----- messages ---------------------------------------------------------------------------------------------------

    def prepare(self, server_round: int) -> Iterator[list[Message]]:
        """Bring the layer, all parts but the last, which comes with the order."""
        if server_round > 2:
            yield from self.bring(server_round, self._layer(self._parts()[:-1]))

    def order(self, server_round: int, client: int) -> tuple[Scalars, Mapping[str, bytes]]:
        """Compare blocks; then train the layer, at first from the base's own block."""
        if server_round == 1:
            return NoScalars(), {}
        blobs = (
            {key: self.result.blob(key) for key in self._parts()[-1]} if server_round > 2 else {}
        )
        return Replace(start=self.result.start), blobs

    def reply_parts(self, server_round: int, client: int) -> Sequence[Sequence[str]]:
        """The cosines, or the layer's tensors."""
        return [[SIMILARITY_KEY]] if server_round == 1 else self._parts()

    def part_order(self, client: int, hashes: list[str]) -> PartRequest:
        """Where the stretch begins says of which layer."""
        return ReplacePart(blob_sha256=hashes, start=self.result.start)

    def deliver(self, server_round: int) -> Iterator[list[Message]]:
        """Bring the result to the clients, so that they can evaluate it on their own text."""
        if self.run.settings.evaluation.own_text:
            yield from self.bring(
                server_round + 1,
                self._layer(self._parts() if self.job.replacement == "layer" else [[]]),
            )

    def _layer(
        self, parts: Sequence[Sequence[str]]
    ) -> Iterator[tuple[Scalars, Mapping[str, bytes]]]:
        """Parts of the layer, and where it belongs."""
        for keys in parts:
            yield Replace(start=self.result.start), {key: self.result.blob(key) for key in keys}

    def _parts(self) -> list[list[str]]:
        return layer_parts(self.run.model.plan, self.run.settings, self.result.start)

    # ----- what came back ---------------------------------------------------------------------------------------------

    def note_report(self, seat: Seat, report: Mapping[str, Any]) -> None:
        """Steps that were left out, and with weights by samples how many windows it has."""
        if "skipped_steps" in report:
            told = self._told[seat.client] = validate(LayerReport, report)
            samples = (
                {"samples": told.samples} if self.federation.client_weights == "samples" else {}
            )
            skipped = seat.metrics.get("skipped_steps", 0) + told.skipped_steps
            seat.metrics = {**samples, "skipped_steps": skipped}

    def received(self, server_round: int) -> None:
        """Take note of what the round's clients began with."""
        if server_round > 1:
            for name, value in self.result.received().items():
                self.reach.note(name, {name: value})

    def is_plausible(self, inbox: Inbox, client: int) -> bool:
        """Whether training can have led to all that a client sent; if not, it is dropped."""
        for name in self._shapes() if self.rounds.finished else ():
            if self._sent(inbox, client, name).abs().max().item() > self.reach.limit(name, name):
                reason = f"reply refused: {name}: {self.reach.reason}"
                self.rounds.drop("train", self.rounds.roster.seats[client], reason)
                return False
        return True

    def fold(self, server_round: int, inbox: Inbox, clients: list[int]) -> None:
        """Pool the cosines and choose; then average the layer, tensor by tensor, in order of client."""
        if server_round == 1:
            self._choose(inbox, clients)
            return
        claimed = {client: float(self._told[client].samples or 1) for client in clients}
        weights = count_claims(self.rounds, "weight", claimed, self.federation.max_weight_ratio)
        self.run.progress.begin("averaging", 1)
        begun = self.result.tensors()
        self.result.replace(
            (name, self._mean(inbox, name, weights, begun[name])) for name in self._shapes()
        )
        self.limits.tell(self.rounds)
        self.run.progress.step("averaged", f"the layer of {count(len(clients), 'client')}")

    def _choose(self, inbox: Inbox, clients: list[int]) -> None:
        claimed = {client: float(self._reports[client]["tokens"]) for client in clients}
        tokens = count_claims(self.rounds, "tokens", claimed, self.federation.max_weight_ratio)
        found = torch.stack(
            [inbox.tensor(client, SIMILARITY_KEY, COSINES).double() for client in clients]
        )
        weights = torch.tensor([tokens[client] for client in clients], dtype=torch.float64)
        cosines = (self._limited(found, clients) * weights[:, None]).sum(dim=0) / weights.sum()
        self.result.cosines, self.result.start = cosines.tolist(), likest(cosines)
        first = self.result.start
        last = self.result.start + self.result.span - 1
        text = (
            f"blocks       {first} to {last} go: cosine {float(cosines.max()):.4f} between what"
            " goes in and what comes out"
        )
        self.run.progress.note("chosen", text, first=first, last=last)

    def _limited(self, cosines: torch.Tensor, clients: Sequence[int]) -> torch.Tensor:
        """Cosines whose distance from 1 is within a ratio of the median client's, stretch by stretch: (clients, stretches)."""
        distances = (1 - cosines).clamp(min=0)
        limited = within_ratio(distances, SINGLE_NUMBERS * self.federation.max_update_ratio)
        changed = limited != distances
        for row, client in enumerate(clients):
            for place in changed[row].nonzero().flatten().tolist():
                self.limits.note(
                    client, place, float(distances[row, place]), float(limited[row, place])
                )
        self.limits.tell(self.rounds, "cosines")
        return torch.where(changed, 1 - limited, cosines)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return layer_shapes(self.run.model.plan.blocks[self.result.start])

    def _sent(self, inbox: Inbox, client: int, name: str) -> torch.Tensor:
        """One tensor as a client sent it, float32."""
        return read_adapter(
            partial(inbox.tensor, client, name), name, self._shapes()[name], self.federation.payload
        )

    def _mean(
        self, inbox: Inbox, name: str, weights: Mapping[int, float], begun: torch.Tensor
    ) -> torch.Tensor:
        """The mean of one tensor, float32; summed in float64, in order of client, and added to what differences are from.

        Each client's change counts up to a multiple of the median client's; one client's tensor is in memory at a time.
        """
        differ = self.federation.sends_differences
        start = begun.to(torch.float64)
        sizes = {}
        for client in weights:
            sent = self._sent(inbox, client, name)
            sizes[client] = root_mean_square(sent if differ else sent - begun)
        factors = self.limits.factors(name, sizes)
        mean = torch.zeros(self._shapes()[name], dtype=torch.float64)
        for client, weight in weights.items():
            sent = self._sent(inbox, client, name).to(torch.float64)
            factor = factors[client]
            if factor < 1:
                sent = sent * factor if differ else start + factor * (sent - start)
            mean += sent * weight
        mean /= sum(weights.values())
        return (mean + begun if differ else mean).to(torch.float32)
