"""FedSODA at a client: tune the adapter's LoRA on the sub-model, with frozen emulator LoRA."""

import torch
from torch import Tensor

from client_app.methods import fedpetuning
from client_app.methods.fedsoda_sub_model import HeldEmulator, held_emulator, require_model
from client_app.protocol.evaluation import Evaluation
from client_app.site import Site
from espalier.errors import StateLost
from espalier.hf.opening.limits import require_within_limits
from espalier.messages.blobs.adapters import sums, unpack_adapters
from espalier.messages.message import MessageBody, validate
from espalier.methods.fedsoda import FedSodaSettings, SubModelOrder, emulator_adapters
from espalier.models.adapters import AdapterPlan, Tensors
from espalier.storage.client_state import PrivateState
from espalier.training.initial_values import initial_values


def train(site: Site, request: MessageBody) -> MessageBody:
    """Train the adapter's LoRA and reply with the first part. Each round is answered once."""
    order = validate(SubModelOrder, request.fields)
    state = site.state(request.header)
    require_model(state, order)
    return fedpetuning.train(
        site, request, _beside(site, state, held_emulator(state, order.aligned))
    )


def alone(site: Site, request: MessageBody) -> MessageBody:
    """Compute the local baseline: train the adapter's LoRA on the sub-model without the others."""
    state = site.state(request.header)
    return fedpetuning.alone(site, request, _beside(site, state, held_emulator(state)))


def evaluate(site: Site, request: MessageBody) -> Evaluation:
    """Prepare to evaluate the sub-model with the local baseline and with the federated adapter."""
    state = site.state(request.header)
    return fedpetuning.evaluate(site, request, _beside(site, state, held_emulator(state)))


def _beside(site: Site, state: PrivateState, held: HeldEmulator) -> fedpetuning.Beside:
    """Return the emulator's frozen LoRA, and the penalty on the distance to the first values."""
    require_within_limits(site.settings, site.model)
    plan, values = _emulator(site, state, held)
    penalty = (
        _Pull(site)
        if site.settings.of(FedSodaSettings).pulls_to_first(site.settings.training)
        else None
    )
    return fedpetuning.Beside(plan, values, held.hashes, penalty, SubModelOrder)


def _emulator(
    site: Site, state: PrivateState, held: HeldEmulator
) -> tuple[AdapterPlan | None, Tensors]:
    if not held.blocks:
        return None, {}
    settings = site.settings
    blobs = held.blobs(state)
    plan = emulator_adapters(site.model.plan, settings, held.blocks)
    if lacking := sorted(plan.shapes().keys() - blobs.keys()):
        raise StateLost(
            f"train: of the emulator's LoRA {', '.join(lacking)} was not sent to this site"
        )
    found = {
        key: unpack_adapters(shapes, blobs[key], settings.federation.wire_dtype)
        for key, shapes in plan.shapes().items()
    }
    if not settings.of(FedSodaSettings).delivers_differences(settings.federation):
        return plan, found
    first = initial_values(site.model, plan, settings.seed)
    return plan, {key: sums(first[key], block) for key, block in found.items()}


class _Pull:
    """FedBiOT's regularizer: squared distance of the trained values to their first values."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._first = dict[str, dict[str, Tensor]]()

    def __call__(self, adapters: AdapterPlan, values: Tensors) -> Tensor:
        """Return ``mu / 2 * ||w - w_first||^2``, a float32 scalar."""
        # The first values follow from the seed and are made at the first call only.
        if not self._first:
            made = initial_values(self._site.model, adapters, self._site.settings.seed)
            self._first = {
                key: {name: made[key][name].to(value.device) for name, value in block.items()}
                for key, block in values.items()
            }
        squares = [
            (value - self._first[key][name]).square().sum()
            for key, block in values.items()
            for name, value in block.items()
        ]
        return self._site.settings.training.proximal / 2 * torch.stack(squares).sum()
