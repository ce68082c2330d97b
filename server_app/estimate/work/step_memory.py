"""Peak memory of a training step in addition to the frozen weights, estimated without weights.

The model's own code and autograd run a step of a model with few blocks on tensors without data
(``espalier/hf/machine/machine_memory.py``). The difference that one block makes gives the figure
for all blocks.

Covers: activations that are kept for the backward pass, with gradient checkpointing too, the loss
over the whole vocabulary at all tokens but the last, and temporary tensors.
Does not cover: gradients and moments, which are counted separately, and workspace of kernels.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from espalier.hf.families import Family
from espalier.hf.machine.traced_memory import traced
from espalier.hf.opening.opened_model import OpenedModel
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
    gated: bool = False,
) -> int:
    """Return the peak bytes of a forward and backward pass of adapters, without gradients.

    Parameters
    ----------
    adapters : trained adapters; blocks below the lowest adapter keep no activations
    gated : the hidden states of all blocks have gradients, because trained gates multiply them
    dtype : dtype of the frozen weights, or over NF4 of the forward pass
    batch_size, tokens : size of a forward pass; no token is padding
    """
    family = model.family
    labels = adapters.head["head.out.bias"][0] if adapters.head else None
    num_blocks = len(model.plan.blocks)
    reached = num_blocks if gated else num_blocks - min(adapters.blocks, default=num_blocks)

    def bytes_of_blocks(blocks: int) -> int:
        skeleton = _skeleton(model, blocks, labels)
        head = list(head_parameters(family, skeleton).values()) if adapters.head else []
        trained = [*head]
        if adapters.blocks:
            # Blocks of adapters take the places of the first blocks of the small model.
            last = sorted(adapters.blocks)[-blocks:]
            renumbered = {place: adapters.blocks[index] for place, index in enumerate(last)}
            few = replace(adapters, blocks=renumbered)
            put = put_in(skeleton, family, few, blocks, settings.lora.dropout)
            trained += [value for block in put.values() for value in block.values()]
        # peft froze the head.
        for parameter in head:
            parameter.requires_grad_(True)
        if gated:
            skeleton.get_input_embeddings().register_forward_hook(_with_gradient)
        for path in family.head_linears.values():
            skeleton.get_submodule(path).register_forward_pre_hook(_in_own_dtype)
        checkpoints = settings.training.gradient_checkpointing
        return _step(skeleton, family, trained, dtype, (batch_size, tokens), checkpoints)

    return _of_many(bytes_of_blocks, num_blocks if gated else len(adapters.blocks), reached)


def _with_gradient(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output.requires_grad_(True)


def whole_step_bytes(model: OpenedModel, dtype: torch.dtype, batch_size: int, tokens: int) -> int:
    """Return the peak bytes of a pass in which the blocks' matrices get gradients themselves.

    The measurement ends when the gradient of the loss is complete.
    """

    def bytes_of_blocks(blocks: int) -> int:
        skeleton = _skeleton(model, blocks, None)
        chosen = [
            block.get_submodule(path).weight.requires_grad_(True)
            for block in skeleton.get_submodule(model.family.blocks)
            for path in model.family.linears.values()
        ]
        return _step(skeleton, model.family, chosen, dtype, (batch_size, tokens), False)

    return _of_many(bytes_of_blocks, len(model.plan.blocks), len(model.plan.blocks))


def _of_many(bytes_of_blocks: Callable[[int], int], present: int, blocks: int) -> int:
    """Extrapolate to ``blocks`` from the bytes of few blocks; ``present`` of them can be traced."""
    num_traced = min(FEW, present)
    first = bytes_of_blocks(max(1, num_traced))
    if blocks <= num_traced:
        return first
    return first + (blocks - num_traced) * (bytes_of_blocks(num_traced + 1) - first)


def _skeleton(model: OpenedModel, blocks: int, labels: int | None) -> Any:
    """Return a model with few blocks, of which nothing is trained."""
    skeleton = model.new_skeleton(labels)
    all_blocks = skeleton.get_submodule(model.family.blocks)
    del all_blocks[blocks:]
    return skeleton.requires_grad_(False)


def _step(
    skeleton: Any,
    family: Family,
    trained: list[nn.Parameter],
    dtype: torch.dtype,
    size: tuple[int, int],
    checkpointing: bool,
) -> int:
    skeleton.config.use_cache = False
    with traced(skeleton, dtype) as live:
        skeleton.train()
        if checkpointing:
            checkpoint_blocks(skeleton)
        before = live.now
        _loss(skeleton, family, *size).backward()
        # Gradients are counted for the whole model, and this is a small one.
        gradients = sum(value.grad.nbytes for value in trained if value.grad is not None)
        return live.most - before - gradients


def _loss(model: Any, family: Family, batch_size: int, tokens: int) -> Tensor:
    """Return a loss that needs the memory of ``loss.counted_predictions``, if all tokens count.

    The logits are copied in float32.
    """
    inputs = torch.zeros(batch_size, tokens, dtype=torch.int64)
    if family.kind == "encoder":
        logits = model(input_ids=inputs).logits
        labels = torch.zeros(batch_size, dtype=torch.int64)
    else:
        rows = torch.arange(batch_size).repeat_interleave(tokens - 1)
        columns = torch.arange(tokens - 1).repeat(batch_size)
        with _choosing(model.get_output_embeddings(), rows, columns):
            logits = model(input_ids=inputs).logits
        labels = inputs[:, 1:].flatten()
    return nn.functional.cross_entropy(logits.to(torch.float32), labels, reduction="sum") / 2


@contextmanager
def _choosing(head: nn.Module, rows: Tensor, columns: Tensor) -> Iterator[None]:
    """Give the head only the hidden states of some positions within the block."""
    hook = head.register_forward_pre_hook(lambda _, inputs: (inputs[0][rows, columns], *inputs[1:]))
    try:
        yield
    finally:
        hook.remove()


def _in_own_dtype(linear: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Cast the head's input: as in a loaded model, the head computes in float32."""
    return (inputs[0].to(linear.weight.dtype), *inputs[1:])
