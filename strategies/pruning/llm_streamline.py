"""Federated LLM-Streamline (Chen et al. 2025).

Paper: "Streamlining Redundant Layers to Compress Large Language Models".
In the first round, every client measures for each stretch of adjacent blocks the cosine between its
input and output (section 2.2). The server pools the cosines over all tokens, and removes the
stretch with the highest one. One layer replaces it. The layer starts as the stretch's first block
and is trained at each client to reproduce the stretch (section 2.3); its weights are averaged every
round. Optionally the stretch is removed without a replacement.

The layer is stored tensor by tensor in the checkpoint's blobs.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from espalier.amounts import count
from espalier.hf.group_scores.streamline import (
    first_layer,
    most_similar_stretch,
    open_streamlined,
    require_streamlined,
)
from espalier.hf.opening.opened_model import OpenedModel, check_labels
from espalier.hf.structured.export import require_form
from espalier.messages.blobs.adapters import differences, pack_adapters, read_adapter, read_layer
from espalier.messages.message import MessageBody, validate
from espalier.methods.pruning.llm_streamline import (
    COSINES,
    SIMILARITY_KEY,
    LayerReport,
    LlmStreamlineSettings,
    Replace,
    ReplacePart,
    layer_parts,
    layer_shapes,
)
from espalier.settings.run import RunSettings
from espalier.storage.blobs import BlobStore
from pruning_kernels.lora.clipping import SINGLE_NUMBERS, root_mean_square, within_ratio
from strategies.averaging.client_weights import count_claims
from strategies.averaging.training_bound import Reach
from strategies.averaging.updates import UpdateLimits
from strategies.base.evaluation import ClientEvaluation
from strategies.base.inbox import Inbox
from strategies.base.method import ClientOrder, Method, ProgressWords, RunResult
from strategies.base.roster import Seat
from strategies.base.run import Run


class StreamlinedResult(RunResult):
    """Smaller model, available when its blocks are chosen; its layer is in ``store``."""

    STATE = ("start", "cosines", "layer", "sent")

    def __init__(self, settings: RunSettings, model: OpenedModel, store: BlobStore) -> None:
        self.settings = settings
        self.base = model
        self.store = store
        self.job = settings.of(LlmStreamlineSettings)
        self.span = self.job.span(len(model.plan.blocks))
        self.start = -1
        """Index of the first removed block; -1 before the choice."""
        self.cosines: list[float] = []
        """Cosine between input and output of each stretch of blocks, by its first block."""
        self.layer: dict[str, str] = {}
        """Hash of each float32 tensor of the layer, by canonical name; empty before training."""
        self.sent: dict[str, str] = {}
        """Hash of each of the layer's tensors as it is sent."""

    def stored(self) -> list[str]:
        """Return the hashes of all blobs that the state names."""
        return [*self.layer.values(), *self.sent.values()]

    def tensors(self) -> dict[str, Tensor]:
        """Return the layer: float32, by canonical name.

        Before its first training it is the base model's block.
        """
        if not self.layer:
            return first_layer(self.base, self.start)
        return {name: load(self.store.get(blob))[name] for name, blob in self.layer.items()}

    def choose(self, start: int, cosines: list[float]) -> None:
        """Remove the stretch that begins with block ``start``, by these cosines."""
        self.start = start
        self.cosines = cosines

    def replace(self, folded: Iterable[tuple[str, Tensor]]) -> None:
        """Store a new layer, tensor by tensor, in full precision and as it is sent."""
        federation = self.settings.federation
        # Differences are relative to the base model's block, which all clients have.
        first = first_layer(self.base, self.start)
        layer: dict[str, str] = {}
        for name, value in folded:
            sent = {name: value}
            # The exact value stays at the server; only the copy that is sent is rounded.
            layer[name] = self.store.put(save(sent))
            if federation.sends_differences:
                sent = differences(sent, first)
            self.sent[name] = self.store.put(pack_adapters(sent, federation.wire_dtype)[0])
        self.layer = layer

    def blob(self, name: str) -> bytes:
        """Return one tensor as it is sent."""
        return self.store.get(self.sent[name])

    def received(self) -> Mapping[str, Tensor]:
        """Return the layer with which clients begin a round: float32, by canonical name."""
        first = first_layer(self.base, self.start)
        blobs = {name: self.blob(name) for name in self.sent}
        return read_layer(blobs, first, self.settings.federation) if blobs else first

    @property
    def model(self) -> OpenedModel:
        """Smaller model."""
        # Without a replacement there is no layer.
        layer = self.tensors() if self.job.replacement == "layer" else None
        return open_streamlined(self.base, self.start, self.span, layer)

    def report(self) -> dict[str, Any]:
        """Return the removed blocks, all cosines, and the number of trained parameters."""
        layer = self.tensors() if self.layer else {}
        return {
            "removed_blocks": list(range(self.start, self.start + self.span)),
            "cosines": self.cosines,
            "trained_parameters": sum(value.numel() for value in layer.values()),
        }


class LlmStreamline(Method):
    """Strategy of LLM-Streamline: pooled cosines, then an averaged layer."""

    result: StreamlinedResult
    WORDS = ProgressWords("answers")

    def __init__(self, run: Run, evaluation: ClientEvaluation) -> None:
        super().__init__(run, evaluation)
        self.job = run.settings.of(LlmStreamlineSettings)
        self.federation = run.settings.federation
        self.result = StreamlinedResult(run.settings, run.model, run.checkpoint.blobs)
        self.reach = Reach(self.job.training, differences=self.federation.sends_differences)
        self._reports: dict[int, LayerReport] = {}
        self._tokens: dict[int, int] = {}
        """Number of tokens that each client compared blocks on."""
        self.limits = UpdateLimits(self.federation.max_update_ratio)

    @classmethod
    def require_fit(
        cls, settings: RunSettings, model: OpenedModel, capabilities: Mapping[str, float]
    ) -> None:
        """Refuse an encoder, a ratio that leaves no block, or a model that cannot be written."""
        check_labels(model.family, None, str(model.directory / "config.json"))
        job = settings.of(LlmStreamlineSettings)
        blocks = len(model.plan.blocks)
        for candidate in require_streamlined(model, job.span(blocks), job.replacement == "layer"):
            require_form(candidate, job.form)

    def description(self) -> str:
        """Return the main settings in words."""
        blocks = len(self.run.model.plan.blocks)
        place = "nothing comes in their place"
        if self.job.replacement == "layer":
            place = (
                f"one layer in their place, {count(self.federation.rounds, 'round')} of"
                f" {count(self.job.steps, 'step')}"
            )
        return f"{self.result.span} of {blocks} neighbouring blocks go, {place}"

    def state(self) -> dict[str, Any]:
        """Return the result and the magnitudes for ``Reach``."""
        return self.result.state() | {"reach": self.reach.starts}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the state that ``state`` returned."""
        self.result.restore(state)
        self.reach.starts = state["reach"]

    # ----- messages -------------------------------------------------------------------------------

    def prepare(self, server_round: int, save: Callable[[], None]) -> None:
        """Push the layer, all parts but the last, which is sent with the order."""
        # Round 1 compares blocks only; bounds start with the layer's first training.
        if server_round > 1:
            for name, value in self.result.received().items():
                self.reach.note(name, {name: value})
        # In round 2 every client has the base model's block.
        if server_round > 2:
            self._push(server_round, omitted=1)

    def order(self, server_round: int, client: int) -> ClientOrder:
        """Return the order to compare blocks, or after round 1 to train the layer.

        In round 2, clients start from the base model's own block, so nothing is sent.
        """
        if server_round == 1:
            return ClientOrder()
        start = self.result.start
        plan = self.run.model.plan
        last_keys = layer_parts(plan, self.run.settings, start)[-1] if server_round > 2 else ()
        return ClientOrder(
            Replace(start=start),
            {key: self.result.blob(key) for key in last_keys},
            fetch=lambda report, hashes: ReplacePart(blob_sha256=hashes, start=start),
        )

    def push_result(self, server_round: int) -> None:
        """Push the result to the clients for the evaluation on their own text."""
        if self.run.settings.evaluation.own_text:
            self._push(server_round + 1)

    def _push(self, server_round: int, omitted: int = 0) -> None:
        """Push the layer, and the start of the stretch that it replaces."""
        start = Replace(start=self.result.start)
        self.rounds.push_all(server_round, start, self.result.blob, omitted=omitted)

    # ----- replies --------------------------------------------------------------------------------

    def note_part(self, seat: Seat, body: MessageBody) -> None:
        """Record tokens, or skipped steps and, with weights by samples, the number of samples."""
        if body.header.kind != "train":
            return
        if body.header.server_round == 1:
            self._tokens[seat.client] = body.fields["tokens"]
            return
        report = self._reports[seat.client] = validate(LayerReport, body.fields)
        # A number of samples may be private, so it is recorded only if it weights the mean.
        samples = {"samples": report.samples} if self.federation.client_weights == "samples" else {}
        seat.note(**samples, skipped_steps=report.skipped_steps)

    def fault_of(self, inbox: Inbox, client: int) -> str | None:
        """Return the first tensor with values that training cannot have reached, and why."""
        # Round 1 has cosines only, which ``_limited`` bounds.
        for name in self._shapes() if self.rounds.finished else ():
            if self._sent(inbox, client, name).abs().max().item() > self.reach.limit(name, name):
                return f"{name}: {self.reach.reason}"
        return None

    def fold(self, server_round: int, inbox: Inbox, clients: list[int]) -> None:
        """Pool the cosines and choose the stretch; in later rounds average the layer."""
        if server_round == 1:
            self._choose(inbox, clients)
            return
        # Equal weights if clients do not report samples.
        claimed = {client: float(self._reports[client].samples or 1) for client in clients}
        weights = count_claims(self.rounds, "weight", claimed)
        self.run.progress.begin("averaging", 1)
        initial = self.result.tensors()
        self.result.replace(
            (name, self._mean(inbox, name, weights, initial[name])) for name in self._shapes()
        )
        self.limits.tell(self.rounds)
        self.run.progress.step("averaged", f"the layer of {count(len(clients), 'client')}")

    def _choose(self, inbox: Inbox, clients: list[int]) -> None:
        claimed = {client: float(self._tokens[client]) for client in clients}
        # The mean over all tokens of all clients, so clients count by tokens.
        tokens = count_claims(self.rounds, "tokens", claimed)
        stacked = torch.stack(
            [inbox.tensor(client, SIMILARITY_KEY, COSINES).double() for client in clients]
        )
        weights = torch.tensor([tokens[client] for client in clients], dtype=torch.float64)
        cosines = (self._limited(stacked, clients) * weights[:, None]).sum(dim=0) / weights.sum()
        # The stretch with the highest cosine changes its input least.
        first = most_similar_stretch(cosines)
        self.result.choose(first, cosines.tolist())
        last = first + self.result.span - 1
        text = (
            f"blocks       {first} to {last} go: cosine {float(cosines.max()):.4f} between what"
            " goes in and what comes out"
        )
        self.run.progress.note("chosen", text, first=first, last=last)

    def _limited(self, cosines: torch.Tensor, clients: Sequence[int]) -> torch.Tensor:
        """Limit distances of cosines, (clients, stretches), from 1 by that of the median client."""
        # Distances from 1, because cosines are all close to 1 and their ratios would show nothing.
        distances = (1 - cosines).clamp(min=0)
        limited = within_ratio(distances, SINGLE_NUMBERS * self.federation.max_update_ratio)
        changed = limited != distances
        for row, client in enumerate(clients):
            for place in changed[row].nonzero().flatten().tolist():
                claimed = float(distances[row, place])
                self.limits.note(client, place, claimed, float(limited[row, place]))
        self.limits.tell(self.rounds, "cosines")
        # Within the limit the bits stay.
        return torch.where(changed, 1 - limited, cosines)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return layer_shapes(self.run.model.plan.blocks[self.result.start])

    def _sent(self, inbox: Inbox, client: int, name: str) -> torch.Tensor:
        """Return one tensor as a client sent it: float32."""
        read = partial(inbox.tensor, client, name)
        return read_adapter(read, name, self._shapes()[name], self.federation.wire_dtype)

    def _mean(
        self, inbox: Inbox, name: str, weights: Mapping[int, float], initial: torch.Tensor
    ) -> torch.Tensor:
        """Return the mean of one tensor: float32, summed in float64 in client order.

        Each client's change is limited relative to the median client. If clients send differences,
        the mean is added to the initial value. Only one client's tensor is in memory at a time.
        """
        differ = self.federation.sends_differences
        start = initial.to(torch.float64)
        sizes = {}
        # First pass: norms of the changes. The second pass reads each tensor again.
        for client in weights:
            sent = self._sent(inbox, client, name)
            sizes[client] = root_mean_square(sent if differ else sent - initial)
        factors = self.limits.factors(name, sizes)
        mean = torch.zeros(self._shapes()[name], dtype=torch.float64)
        for client, weight in weights.items():
            sent = self._sent(inbox, client, name).to(torch.float64)
            factor = factors[client]
            if factor < 1:
                # Shorten the change; a difference is the change itself.
                sent = sent * factor if differ else start + factor * (sent - start)
            mean += sent * weight
        # The mean of differences is added to the exact value, not to the rounded one that was sent.
        mean /= sum(weights.values())
        return (mean + initial if differ else mean).to(torch.float32)
