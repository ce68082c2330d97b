"""FedSpine at a device: LoRA training in the cut model, and measurement of its prunable groups.

The device also evaluates its own smaller model. Adapters and a few numbers are sent; the
importances of prunable groups stay in the client state and determine the next cut
(``fedspine_cut.py``).
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from client_app.methods.tuning import adapter_averaging, round_adapters
from client_app.methods.tuning.personal_model import own_folder, write_own, write_own_encoder
from client_app.protocol import client_state
from client_app.protocol.answer_once import answer_once
from client_app.protocol.errors import kernel_errors
from client_app.protocol.evaluation import (
    Evaluation,
    prepare_evaluation,
    prepare_task_evaluation,
    require_own_data,
)
from client_app.protocol.local_baseline import make_local_baseline
from client_app.protocol.push import (
    pushed_blobs,
    pushed_parts,
    result_header,
    start_blobs,
    start_hashes,
)
from client_app.site import Site
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.stream.edits import Edits
from espalier.hf.whole.adapters import merged
from espalier.messages.blobs.cut_bits import read_bits
from espalier.messages.evaluation import LOSS_DIGITS, MAX_LOSS
from espalier.messages.message import Header, MessageBody, validate
from espalier.methods.tuning.adapters.contract import Order
from espalier.methods.tuning.adapters.tensors import parts
from espalier.methods.tuning.fedspine import (
    STRUCTURE,
    FedSpineSettings,
    SpineReport,
    shortened,
    trained,
)
from espalier.models.adapters import AdapterPlan, Tensors, head_plan
from espalier.models.groups import Cut, Groups
from espalier.seeds import derive_seed
from espalier.settings.tables.task import TEXT
from espalier.storage.client_state import PrivateState
from espalier.training.adapted_model import flattened
from espalier.training.adapter_training import AdapterTraining
from espalier.training.group_importance import GroupImportance
from espalier.training.loss import num_counted, summed_loss
from espalier.training.sequences import client_sequences

GROUPS = "groups"
"""Key of the stored tensors."""


def keep_measured(state: PrivateState, server_round: int, cut: Cut, values: Tensor | None) -> None:
    """Store the importances of the remaining groups.

    Without values (no step was finite), the importances of earlier rounds are kept. ``cut`` is a
    mask over the whole model, (groups,), bool; ``values`` are (remaining groups,), float64.
    """
    if values is None:
        return
    all_values = torch.zeros(len(cut), dtype=torch.float64)
    # Over all groups of the uncut model; 0 for those that are cut.
    all_values[torch.from_numpy(~cut)] = values
    kept = {GROUPS: {"values": all_values, "cut": torch.from_numpy(cut.copy())}}
    client_state.keep(state, client_state.IMPORTANCE, server_round, kept)


def measured_importance(
    state: PrivateState, server_round: int, cut: Cut
) -> NDArray[np.float64] | None:
    """Return the importances measured before a round, (groups,), float64, 0 for cut groups.

    The result is None if there are none, or if they belong to another cut.
    """
    kept = client_state.before(state, client_state.IMPORTANCE, server_round).get(GROUPS)
    # Importances belong to the cut that they were measured on.
    if kept is None or not np.array_equal(kept["cut"].numpy(), cut):
        return None
    values: NDArray[np.float64] = kept["values"].numpy()
    return values


FIRST_PART = 1
"""Number of the first part of the global adapters in a round; part 0 asks for a cut."""


@dataclass(frozen=True)
class CutModel:
    """Smaller model of a device at a rank limit, with the cut that a request contains."""

    site: Site
    structure: bytes | None
    """Bit mask of the cut; None if nothing is cut."""
    rank_limit: int | None = None

    @cached_property
    def cut(self) -> Cut:
        """Mask of the cut groups over the whole model, shape (groups,), bool."""
        groups = Groups.of(self.site.model.plan)
        return groups.none if self.structure is None else read_bits(groups, self.structure)

    @cached_property
    def model(self) -> OpenedModel:
        """Smaller model that remains after the cut."""
        # Without a cut the base is used as it is, with its cache.
        if not self.cut.any():
            return self.site.model
        structure = Groups.of(self.site.model.plan).structure(self.cut)
        return OpenedModel(self.site.model.directory, structure)

    @cached_property
    def adapters(self) -> AdapterPlan:
        """LoRA adapters of the smaller model."""
        return trained(self.site.model.plan, self.site.settings, self.rank_limit, self.structure)

    @property
    def cache_folder(self) -> Path | None:
        """Folder for the NF4 copy of the model; None for a cut model, which changes every round."""
        return None if self.cut.any() else round_adapters.cache_of(self.site)


# ----- a round -----


def train(site: Site, request: MessageBody) -> MessageBody:
    """Train the round's adapters and reply with the first part. Each round is answered once."""
    order = validate(Order, request.fields)
    cut_model = CutModel(site, request.blobs.get(STRUCTURE), order.rank_limit)

    def work(state: PrivateState) -> SpineReport:
        require_own_data(site, request.header)
        return _train(site, state, request, cut_model)

    # The cut and the adapters are both inputs of the answer.
    return answer_once(site, request, work, lambda _: start_hashes(site, request, first=FIRST_PART))


def _train(
    site: Site, state: PrivateState, request: MessageBody, cut_model: CutModel
) -> SpineReport:
    """Train, store all blobs and the measured importances, and return the report."""
    started = time.monotonic()
    server_round = request.header.server_round
    start = round_adapters.begins_with(
        site, cut_model.adapters, start_blobs(site, request, first=FIRST_PART)
    )
    training, watch = _training(site, cut_model, request.header.client)
    steps = site.settings.training.steps
    first_step = (server_round - 1) * steps
    # The check is repeated after training: skipped steps contribute no tokens.
    adapter_averaging.require_enough(site, training, range(first_step, first_step + steps))
    numbers = measured_sequences(site, training, range(first_step, first_step + steps))
    with kernel_errors():
        # 1. Loss before training, with the weights of this round's start.
        loss_before = loss_of(training, start, numbers)
        # 2. Train; the observer sees each step's gradients.
        with watch.watching():
            tensors, outcome = training.run(start, first_step, steps)
        # 3. Loss after training, on the same sequences.
        loss_after = loss_of(training, tensors, numbers)
    adapter_averaging.require_enough(site, training, outcome.weighed)
    # They stay here and decide the next cut.
    keep_measured(state, server_round, cut_model.cut, watch.importance)
    limit = validate(Order, request.fields).rank_limit
    seconds = time.monotonic() - started
    hashes = round_adapters.keep_blobs(site, state, server_round, tensors, start, limit)
    return SpineReport(
        **adapter_averaging.report_of(site, seconds, training, outcome, limit, hashes),
        loss_before=loss_before,
        loss_after=loss_after,
        # Rounded, so that the value tells less.
        taylor=shortened(watch.taylor),
    )


def _training(
    site: Site, cut_model: CutModel, client: int
) -> tuple[AdapterTraining, GroupImportance]:
    """Return a device's training, and the observer that measures its prunable groups."""
    settings = site.settings
    watch = GroupImportance(
        cut_model.model, cut_model.adapters, lambda: training.adapted, settings.of(FedSpineSettings)
    )
    training = AdapterTraining(
        model=cut_model.model,
        computing=site.computing,
        settings=settings,
        adapters=cut_model.adapters,
        sequences=client_sequences(settings, site.node, site.model, client),
        seed=derive_seed(settings.seed, "training", client=client),
        cache_folder=cut_model.cache_folder,
        load=site.load,
        observer=watch,
    )
    return training, watch


MEASURED = 8
"""Number of sequences on which the loss is measured, if ``min-tokens`` does not demand more."""


def measured_sequences(site: Site, training: AdapterTraining, steps: Sequence[int]) -> list[int]:
    """Return the numbers of the sequences on which the round's progress is measured.

    They are the first ones of the round, and enough of them for the site policy: the losses are
    means over all of them. With ``min-groups`` they are all sequences of the round.
    """
    numbers = list(training.used(steps))
    # With a minimum number of groups, all sequences count towards it.
    if site.node.fewest_groups():
        return numbers
    enough = site.node.fewest_tokens()
    tokens = 0
    # As few sequences as the policy permits, because each is measured twice.
    for place, num_tokens in enumerate(training.sequences.tokens(numbers), start=1):
        tokens += num_tokens
        if place >= MEASURED and tokens >= enough:
            return numbers[:place]
    return numbers


@torch.no_grad()
def loss_of(training: AdapterTraining, tensors: Tensors, numbers: Sequence[int]) -> float:
    """Return the mean loss of some sequences in nats, rounded, with these trained values."""
    adapted = training.adapted
    adapted.set(tensors)
    device = next(iter(flattened(adapted.parameters).values())).device
    size = training.settings.training.batch_size
    total = 0.0
    counted = 0
    for first in range(0, len(numbers), size):
        batch = training.sequences.batch(numbers[first : first + size])
        total += summed_loss(adapted.whole, batch, device).item()
        counted += num_counted(batch)
    mean = total / counted
    # A diverged model has a loss that the contract allows.
    return round(min(mean, MAX_LOSS) if math.isfinite(mean) else MAX_LOSS, LOSS_DIGITS)


# ----- the device's own model -----


def local_baseline(site: Site, request: MessageBody) -> MessageBody:
    """Write the device's smaller model, as the rounds left it, if its owner wants it."""

    def make(state: PrivateState) -> dict[str, Any]:
        if (target := own_folder(site, state)) is not None:
            cut_model, tensors = _pushed(site, request.header)
            # An encoder has a head, which is written with it.
            if cut_model.adapters.head:
                write_own_encoder(site, cut_model.model, cut_model.adapters, tensors, target)
            else:
                write_own(site, cut_model.model, _edits(cut_model, tensors), target)
        return {}

    return make_local_baseline(site, request, make)


def _edits(cut_model: CutModel, tensors: Tensors) -> Edits:
    """Return the edits that merge LoRA into the smaller model."""
    return merged(cut_model.adapters, tensors)


def evaluate(site: Site, request: MessageBody) -> Evaluation:
    """Prepare to evaluate the device's own smaller model on evaluation text or items.

    With ``own_text`` it is also compared with the dense model on the device's own held-out data.
    """
    cut_model, tensors = _pushed(site, request.header)
    if site.settings.task.name == TEXT:
        edits = _edits(cut_model, tensors)
        return prepare_evaluation(
            site, request, (cut_model.model, edits), lambda: (cut_model.model, edits)
        )

    def model_of(name: str) -> Any:
        if name == "dense":
            untrained = head_plan(site.model.plan, site.settings.num_classes)
            # Untrained: the dense model has a new classification head.
            return site.load(
                site.model, site.computing, site.settings, untrained, round_adapters.cache_of(site)
            ).whole
        adapted = site.load(
            cut_model.model,
            site.computing,
            site.settings,
            cut_model.adapters,
            cut_model.cache_folder,
        )
        adapted.set(tensors)
        return adapted.whole

    return prepare_task_evaluation(site, request, model_of)


def _pushed(site: Site, header: Header) -> tuple[CutModel, Tensors]:
    """Return the final cut and adapters of this device."""
    # The first part contains the cut, and the number of parts follows from the cut.
    store, hashes, _ = pushed_parts(site, result_header(header), 1)
    cut_model = CutModel(site, store.get(hashes[STRUCTURE]))
    blobs = pushed_blobs(site, result_header(header), len(parts(cut_model.adapters, site.settings)))
    return cut_model, round_adapters.begins_with(site, cut_model.adapters, blobs)
