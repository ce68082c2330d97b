"""Mask Tuning of an encoder after LoRA: search, rearrangement and rescaling (FedLoRA + Prune).

The app's LLM-Pruner scores language models by the loss of the next token. So the masks of an
encoder are computed here, with the app's kernels. Each device contributes the gradients of masks on
its first labelled items, and the server decides by the mean over all.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.smaller.bench import SAMPLES
from espalier.data.tasks.item import Batch
from espalier.evaluation.scores import score
from espalier.hf.group_scores.mask_tuning import scales_or_none
from espalier.hf.opening.opened_model import OpenedModel, open_model
from espalier.hf.structured.selection import in_sequence, lowest
from espalier.methods.pruning.llm_pruner import LlmPrunerSettings
from espalier.models.groups import Groups
from espalier.models.structure import GROUP_KINDS, READERS, group_size
from espalier.settings.node import simulated_node
from espalier.settings.run import RunSettings, parse
from espalier.training.loss import summed_loss
from espalier.training.sequences import client_sequences
from pruning_kernels.groups.mask_tuning import fisher_factor, joint_outputs, rearranged
from pruning_kernels.groups.slicing import second_moments
from server_app.public_tests import public_tests

CPU = torch.device("cpu")
Place = tuple[int, str]
"""Block index and kind of group."""


@dataclass(frozen=True)
class MaskTuned:
    """Result of Mask Tuning."""

    masks: Mapping[Place, Tensor]
    """Masks, (groups,), float64: 0 for removed groups, the scale for kept ones."""
    score: float
    pruned: float
    """Removed fraction of the parameters of prunable groups."""


def mask_tuned(
    settings: RunSettings, tuned: Path, share: float, how: Mapping[str, Any], metric: str
) -> MaskTuned:
    """Cut an encoder with its classification head to a pruning ratio.

    Parameters
    ----------
    settings : settings of the run that tuned it: task, devices and their items
    tuned : directory of the model with merged LoRA
    share : pruning ratio
    how : settings of ``[llm-pruner]``, dotted
    metric : name of the returned score
    """
    from transformers import AutoModelForSequenceClassification

    job = parse({**how, "method": "llm-pruner", "pruning.ratio": share}).of(LlmPrunerSettings)
    model = open_model(settings.model)
    whole = (
        AutoModelForSequenceClassification.from_pretrained(tuned, dtype=torch.float32)
        .eval()
        .requires_grad_(False)
    )
    batches = list(_batches(settings, model))
    gradients = mask_gradients(model, whole, batches)
    masks = _cut(model, gradients, job)
    if job.rescaled:
        masks |= _scaled(model, whole, batches, masks, job)
    tests = public_tests(settings, model)
    assert tests.encoded is not None
    with masked(model, whole, masks):
        found = score(whole, tests.encoded, True, settings.training.batch_size, CPU)[metric]
    groups = Groups.of(model.plan)
    gone = [masks[index, kind] == 0 for index in groups.blocks for kind in GROUP_KINDS]
    return MaskTuned(masks, found, groups.ratio(torch.cat(gone).numpy()))


def _batches(settings: RunSettings, model: OpenedModel) -> Iterator[Batch]:
    """Yield the first items of each device, in batches as in training."""
    size = settings.training.batch_size
    for client in range(settings.num_clients):
        sequences = client_sequences(settings, simulated_node(), model, client)
        numbers = range(min(SAMPLES, len(sequences)))
        yield from (sequences.batch(numbers[first : first + size]) for first in numbers[::size])


def _readers(model: OpenedModel, whole: nn.Module) -> Iterator[tuple[Place, nn.Linear, int]]:
    """Yield the matrices that read prunable groups, with the number of features of a group."""
    for index in range(len(model.plan.blocks)):
        for kind, name in READERS.items():
            module = whole.get_submodule(model.family.module_path(index, name))
            assert isinstance(module, nn.Linear)
            yield (index, kind), module, group_size(model.plan, name, kind)


def mask_gradients(
    model: OpenedModel, whole: nn.Module, batches: Sequence[Batch]
) -> dict[Place, Tensor]:
    """Return the gradients of each item's loss with respect to masks of one.

    Shape (items, groups), float64, by place (Kwon et al. 2022, equation 6).
    """
    rows: dict[Place, list[Tensor]] = {place: [] for place, _, _ in _readers(model, whole)}
    for batch in batches:
        ones = {
            place: torch.ones(len(batch.labels), module.in_features // size, requires_grad=True)
            for place, module, size in _readers(model, whole)
        }
        with masked(model, whole, ones):
            summed_loss(whole, batch, CPU).backward()
        for place, mask in ones.items():
            assert mask.grad is not None
            rows[place].append(mask.grad.double())
    return {place: torch.cat(own) for place, own in rows.items()}


def _cut(
    model: OpenedModel, gradients: Mapping[Place, Tensor], job: LlmPrunerSettings
) -> dict[Place, Tensor]:
    """Return masks of 0 and 1.

    The search uses the diagonal of the Fisher information, the rearrangement all of it.
    """
    groups = Groups.of(model.plan)
    scores = {
        index: {kind: gradients[index, kind].square().mean(0) for kind in GROUP_KINDS}
        for index in groups.blocks
    }
    cut = lowest(groups, in_sequence(groups, scores), job, groups.reachable(job))
    masks = {}
    for index in groups.blocks:
        for kind in GROUP_KINDS:
            gone = torch.from_numpy(cut[groups.at(index, kind)])
            rows = gradients[index, kind]
            if kind in job.rearranged:
                gone = rearranged(fisher_factor(rows, min(rows.shape)), gone)
            masks[index, kind] = (~gone).double()
    return masks


@torch.no_grad()
def _scaled(
    model: OpenedModel,
    whole: nn.Module,
    batches: Sequence[Batch],
    masks: Mapping[Place, Tensor],
    job: LlmPrunerSettings,
) -> dict[Place, Tensor]:
    """Return masks with scales that reproduce the output of the whole part.

    The least-squares problem uses the inputs that the part has in the cut model.
    """
    moments: dict[Place, Tensor] = {}

    def watch(place: Place, tokens: Tensor, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen = second_moments(inputs[0][tokens])
        moments[place] = moments[place].add_(seen) if place in moments else seen

    for batch in batches:
        with ExitStack() as hooks:
            for place, module, _ in _readers(model, whole):
                hooks.callback(
                    module.register_forward_pre_hook(
                        partial(watch, place, batch.attention_mask.bool())
                    ).remove
                )
            # Register these hooks last, so that the watching hooks see unmasked inputs.
            hooks.enter_context(masked(model, whole, masks))
            whole(input_ids=batch.input_ids, attention_mask=batch.attention_mask)
    found = {}
    for place, module, size in _readers(model, whole):
        stays = masks[place] > 0
        if place[1] not in job.rescaled or stays.all():
            continue
        own = joint_outputs(moments[place], module.weight, size)[stays]
        scales = scales_or_none((own[:, stays], own.sum(1)))
        if scales is not None:
            found[place] = masks[place].masked_scatter(stays, scales)
    return found


@contextmanager
def masked(model: OpenedModel, whole: nn.Module, masks: Mapping[Place, Tensor]) -> Iterator[None]:
    """Multiply the outputs of groups by ``masks`` while the model is used in the block.

    A mask has shape (groups,), or (items, groups) with one row per item.
    """

    def mask(values: Tensor, _: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (inputs[0] * values.to(inputs[0]), *inputs[1:])

    with ExitStack() as hooks:
        for place, module, size in _readers(model, whole):
            values = masks[place].repeat_interleave(size, dim=-1)
            # Add a token dimension: the mask is the same for all tokens.
            values = values.unsqueeze(1) if values.ndim > 1 else values
            hooks.callback(module.register_forward_pre_hook(partial(mask, values)).remove)
        yield
