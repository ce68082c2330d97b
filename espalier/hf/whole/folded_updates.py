"""Updates that are folded into the base model, as two thin factors per matrix.

The base keeps its weights ``W``, in any precision. With an adapter of scaling s and the factors P
and Q of the folded update, the model computes ``W x + s P (Q x) + s B (A x)``. So a client adds
only the factors, and the result is one adapter of a larger rank: ``B A + P Q`` is the product of
``[B P]`` and ``[A; Q]``.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from espalier.hf.families import Family
from espalier.models.adapters import FACTORS, Adapter, AdapterPlan, Tensors
from espalier.models.plan import block_key


@contextmanager
def folded_in(
    whole: nn.Module, family: Family, adapters: AdapterPlan, tensors: Tensors
) -> Iterator[None]:
    """Add the folded updates among ``tensors`` to a model with adapters, within the block."""
    with ExitStack() as hooks:
        for index, adapter in adapters:
            block = tensors.get(block_key(index), {})
            if adapter.folded_b not in block:
                continue
            module: Any = whole.get_submodule(family.module_path(index, adapter.linear.name))
            device = module.base_layer.weight.device
            left = adapter.scaling * block[adapter.folded_b].to(device)
            right = block[adapter.folded_a].to(device)
            hook = module.base_layer.register_forward_hook(partial(_added, left, right))
            hooks.callback(hook.remove)
        yield


def _added(left: Tensor, right: Tensor, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    """Return the output of a matrix with the folded update, which is computed in float32."""
    hidden = nn.functional.linear(inputs[0].to(right.dtype), right)
    return output + nn.functional.linear(hidden, left).to(output.dtype)


def joined_plan(adapters: AdapterPlan, folded: int, *, alone: bool = False) -> AdapterPlan:
    """Return the plan of adapters that contain folded updates of a rank; all have the same rank.

    ``alone`` leaves the adapters' own updates out.
    """
    max_rank = max((adapter.folded_rank(folded) for _, adapter in adapters), default=0)

    def joined(adapter: Adapter) -> Adapter:
        return replace(adapter, rank=max_rank if alone else adapter.rank + max_rank)

    blocks = {
        index: tuple(map(joined, block_adapters))
        for index, block_adapters in adapters.blocks.items()
    }
    return replace(adapters, blocks=blocks, factors=FACTORS, folded=0)


def padded(plan: AdapterPlan, tensors: Tensors) -> dict[str, dict[str, Tensor]]:
    """Return adapters of lower ranks padded with zeros to those of a plan.

    The updates stay the same: zeros add nothing to the product B A.
    """
    result: dict[str, dict[str, Tensor]] = {}
    for key, shapes in plan.shapes().items():
        for name, tensor in tensors[key].items():
            # Factors that are not trained are not in the shapes; they have the rank of the plan.
            value = torch.zeros(shapes.get(name, tensor.shape))
            value[tuple(map(slice, tensor.shape))] = tensor
            result.setdefault(key, {})[name] = value
    return result


def joined_tensors(
    plan: AdapterPlan, key: str, tensors: Mapping[str, Tensor], *, alone: bool = False
) -> dict[str, Tensor]:
    """Return one blob's tensors as those of ``joined_plan``; shorter factors end with zeros."""
    shapes = plan.shapes()[key]
    joined = {name: value for name, value in tensors.items() if name in plan.whole.get(key, {})}
    for index, adapter in plan:
        if block_key(index) != key:
            continue
        pairs = [] if alone else [(tensors[adapter.name_b], tensors[adapter.name_a])]
        if adapter.folded_b in tensors:
            pairs.append((tensors[adapter.folded_b], tensors[adapter.folded_a]))
        b = torch.zeros(shapes[adapter.name_b])
        a = torch.zeros(shapes[adapter.name_a])
        start = 0
        for left, right in pairs:
            b[:, start : start + len(right)] = left
            a[start : start + len(right)] = right
            start += len(right)
        joined |= adapter.named(b, a)
    return joined
