"""Bytes that a training step keeps between its forward and its backward pass, without doing either.

The model's own code runs on torch's fake tensors, which have shapes and dtypes and no numbers, and autograd says which
tensors it saves. Covers: what autograd saves on a CPU, each storage once, for the mean loss over all tokens of a full batch.
Does not cover: what a kernel needs while it runs, such as a matrix that was dequantised, or a gradient on its way; the CUDA
kernels, whose attention may save a little more or less; and gradient checkpointing, which keeps a block's input alone.
"""

from typing import Any

import torch
from torch import Tensor, nn

from espalier.modeling.adapters import put_in
from espalier.modeling.families import Family
from espalier.modeling.whole import head_parameters
from espalier.wire.adapters import AdapterPlan


def saved_bytes(
    skeleton: Any,
    family: Family,
    adapters: AdapterPlan,
    num_blocks: int,
    dtype: torch.dtype,
    batch_size: int,
    tokens: int,
) -> int:
    """Bytes of the activations that are kept for the backward pass.

    Parameters
    ----------
    skeleton : the model without weights, as ``skeleton_of`` gives it; it is used up
    dtype : of the frozen weights, or, where the blocks' linears are in NF4, of the forward pass, which saves as much: a frozen
        linear keeps no activation in either form
    batch_size, tokens : of a forward pass; no token is padding
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    head = list(head_parameters(family, skeleton).values())
    for parameter in skeleton.parameters():
        parameter.requires_grad_(False)
        if not any(parameter is one for one in head):
            parameter.data = parameter.data.to(dtype)
    put_in(skeleton, family, adapters, num_blocks, dropout=0.0)
    for parameter in head:  # peft froze it
        parameter.requires_grad_(True)
    for path in family.head_linears.values():
        skeleton.get_submodule(path).register_forward_pre_hook(_in_own_dtype)
    with FakeTensorMode(allow_non_fake_inputs=True):
        skeleton.to_empty(device="cpu").train()
        return _saved_in_forward(skeleton, family, batch_size, tokens)


def _saved_in_forward(model: Any, family: Family, batch_size: int, tokens: int) -> int:
    held = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    # Tensors are kept, so that no storage can take the place of an earlier one.
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
    """As in a loaded model, the head computes in float32."""
    return (inputs[0].to(linear.weight.dtype), *inputs[1:])
