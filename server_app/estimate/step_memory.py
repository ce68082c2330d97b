"""Peak memory of a training step in addition to the frozen weights, estimated without weights.

The model's own code and autograd run a step of a model with few blocks on tensors without data
(``espalier/hf/machine/machine_memory.py``). The difference that one block makes gives the figure for all
blocks.

Covers: activations that are kept for the backward pass, with gradient checkpointing too, the loss
over the whole vocabulary, and temporary tensors.
Does not cover: gradients and moments, which are counted separately, and workspace of kernels.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from espalier.hf.families import Family
from espalier.hf.machine.machine_memory import traced
from espalier.hf.opening.opened import OpenedModel
from espalier.hf.whole.adapters import put_in
from espalier.hf.whole.model import head_parameters
from espalier.models.adapters import AdapterPlan
from espalier.settings.run import RunSettings
from espalier.training.loop import checkpoint_blocks

FEW = 2
"""Number of blocks of the smallest traced model; from the second block on each adds the same."""


def step_bytes(
    model: OpenedModel,
    settings: RunSettings,
    adapters: AdapterPlan,
    dtype: torch.dtype,
    batch_size: int,
    tokens: int,
) -> int:
    """Return the peak bytes of a forward and backward pass of adapters, without gradients.

    Parameters
    ----------
    adapters : trained adapters; blocks below the lowest adapter keep no activations
    dtype : dtype of the frozen weights, or over NF4 of the forward pass
    batch_size, tokens : size of a forward pass; no token is padding
    """
    blocks = len(model.plan.blocks)
    reached = blocks - min(adapters.blocks, default=0)
    if not adapters.blocks:
        reached = 0

    def prepare(skeleton: Any, number: int) -> list[nn.Parameter]:
        first = sorted(adapters.blocks)[-number:]
        own = {place: adapters.blocks[index] for place, index in enumerate(first)}
        for parameter in skeleton.parameters():
            parameter.requires_grad_(False)
        head = list(head_parameters(model.family, skeleton).values()) if adapters.head else []
        put = (
            put_in(
                skeleton, model.family, replace(adapters, blocks=own), number, settings.lora.dropout
            )
            if own
            else {}
        )
        # peft froze the head.
        for parameter in head:
            parameter.requires_grad_(True)
        for path in model.family.head_linears.values():
            skeleton.get_submodule(path).register_forward_pre_hook(_in_own_dtype)
        return [*(value for block in put.values() for value in block.values()), *head]

    labels = adapters.head["head.out.bias"][0] if adapters.head else None
    checkpointing = settings.training.gradient_checkpointing
    least = min(FEW, len(adapters.blocks))
    if least == 0:
        return _step(model, prepare, 1, dtype, batch_size, tokens, labels, checkpointing)
    return _of_many(
        lambda few: _step(model, prepare, few, dtype, batch_size, tokens, labels, checkpointing),
        least,
        reached,
    )


def whole_step_bytes(model: OpenedModel, dtype: torch.dtype, batch_size: int, tokens: int) -> int:
    """Return the peak bytes of a pass in which the blocks' matrices get gradients themselves.

    The measurement ends when the gradient of the loss is complete.
    """

    def prepare(skeleton: Any, number: int) -> list[nn.Parameter]:
        chosen = []
        for parameter in skeleton.parameters():
            parameter.requires_grad_(False)
        for block in skeleton.get_submodule(model.family.blocks):
            for path in model.family.linears.values():
                weight = block.get_submodule(path).weight
                chosen.append(weight.requires_grad_(True))
        return chosen

    blocks = len(model.plan.blocks)
    least = min(FEW, blocks)
    return _of_many(
        lambda few: _step(model, prepare, few, dtype, batch_size, tokens, None, False),
        least,
        blocks,
    )


def _of_many(of_few: Callable[[int], int], least: int, blocks: int) -> int:
    """Extrapolate from the bytes of few blocks to those of many."""
    first = of_few(least)
    if blocks <= least:
        return first
    return first + (blocks - least) * (of_few(least + 1) - first)


def _step(
    model: OpenedModel,
    prepare: Callable[[Any, int], list[nn.Parameter]],
    blocks: int,
    dtype: torch.dtype,
    batch_size: int,
    tokens: int,
    labels: int | None,
    checkpointing: bool,
) -> int:
    skeleton = model.new_skeleton(labels)
    of_all = skeleton.get_submodule(model.family.blocks)
    del of_all[blocks:]
    trained = prepare(skeleton, blocks)
    config = skeleton.config
    config.use_cache = False
    with traced(skeleton, dtype) as live:
        skeleton.train()
        if checkpointing:
            checkpoint_blocks(skeleton)
        before = live.now
        loss = _loss(skeleton, model.family, batch_size, tokens)
        loss.backward()
        gradients = sum(value.grad.nbytes for value in trained if value.grad is not None)
        return live.most - before - gradients


def _loss(model: Any, family: Family, batch_size: int, tokens: int) -> Tensor:
    """Return a loss that needs the memory of ``loss.counted_predictions``.

    The counted logits are copied in float32.
    """
    inputs = torch.zeros(batch_size, tokens, dtype=torch.int64)
    logits = model(input_ids=inputs).logits
    labels = torch.zeros(batch_size, dtype=torch.int64)
    if family.kind == "decoder":
        rows = torch.arange(batch_size).repeat_interleave(tokens - 1)
        columns = torch.arange(tokens - 1).repeat(batch_size)
        logits = logits[:, :-1][rows, columns]
        labels = inputs[:, 1:].flatten()
    return nn.functional.cross_entropy(logits.to(torch.float32), labels, reduction="sum") / 2


def _in_own_dtype(linear: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Cast the head's input: as in a loaded model, the head computes in float32."""
    return (inputs[0].to(linear.weight.dtype), *inputs[1:])
