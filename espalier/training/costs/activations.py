"""Bytes of activations that a training step keeps for its backward pass, without running it.

The model's own code runs on torch's fake tensors, which have shapes and dtypes but no data, and
autograd reports which tensors it saves.

Covers: tensors that autograd saves on a CPU, each storage once, for the mean loss over all tokens
of a full batch.
Does not cover: workspace of kernels, such as a dequantised matrix or an intermediate gradient; CUDA
kernels, whose attention can save a different amount; and gradient checkpointing, which keeps only a
block's input.
"""

from typing import Any

import torch
from torch import Tensor, nn

from espalier.hf.families import Family
from espalier.hf.whole.adapters import put_in
from espalier.hf.whole.model import head_parameters
from espalier.models.adapters import AdapterPlan


def saved_bytes(
    skeleton: Any,
    family: Family,
    adapters: AdapterPlan,
    num_blocks: int,
    dtype: torch.dtype,
    batch_size: int,
    tokens: int,
) -> int:
    """Return the bytes of activations that are kept for the backward pass.

    Parameters
    ----------
    skeleton : model without weights from ``skeleton_of``; it cannot be used afterwards
    dtype : dtype of the frozen weights; for linears in NF4 that of the forward pass, which saves
        the same tensors, because a frozen linear keeps no activation in either form
    batch_size, tokens : size of a forward pass; no token is padding
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    head = list(head_parameters(family, skeleton).values())
    for parameter in skeleton.parameters():
        parameter.requires_grad_(False)
        if not any(parameter is one for one in head):
            parameter.data = parameter.data.to(dtype)
    put_in(skeleton, family, adapters, num_blocks, dropout=0.0)
    # peft froze the head.
    for parameter in head:
        parameter.requires_grad_(True)
    for path in family.head_linears.values():
        skeleton.get_submodule(path).register_forward_pre_hook(_in_own_dtype)
    with FakeTensorMode(allow_non_fake_inputs=True):
        skeleton.to_empty(device="cpu").train()
        return _saved_in_forward(skeleton, family, batch_size, tokens)


def _saved_in_forward(model: Any, family: Family, batch_size: int, tokens: int) -> int:
    held = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    # The tensors stay referenced, so that no new storage reuses the address of an earlier one.
    saved: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()._cdata
        if storage not in held:
            saved[storage] = tensor
        return tensor

    inputs = torch.zeros(batch_size, tokens, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        logits = model(input_ids=inputs).logits
        labels = torch.zeros(batch_size, dtype=torch.int64)
        if family.kind == "decoder":
            logits = logits[:, :-1].flatten(0, 1)
            labels = inputs[:, 1:].flatten()
        nn.functional.cross_entropy(logits.to(torch.float32), labels)
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


def _in_own_dtype(linear: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Cast the head's input: as in a loaded model, the head computes in float32."""
    return (inputs[0].to(linear.weight.dtype), *inputs[1:])
