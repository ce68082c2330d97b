"""Square matrices that are trained between the frozen factors of LoRA (LoRA-SB, LoRA-XS).

The update of a matrix is ``scaling * B R A``, with A and B frozen and R of rank by rank numbers.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from espalier.hf.families import Family
from espalier.hf.whole.adapters import NAME
from espalier.models.adapters import AdapterPlan
from espalier.models.plan import block_key


@contextmanager
def inner_matrices(
    whole: nn.Module,
    parameters: Mapping[str, dict[str, nn.Parameter]],
    family: Family,
    adapters: AdapterPlan,
) -> Iterator[None]:
    """Add the matrices to a model with adapters within the block, if the plan has frozen bases.

    ``parameters`` has those of the adapters by blob key and canonical name, and gets the matrices.
    """
    with ExitStack() as hooks:
        for index, adapter in adapters if adapters.bases else ():
            module: Any = whole.get_submodule(family.module_path(index, adapter.linear.name))
            lora_a = module.lora_A[NAME]
            zeros = torch.zeros(adapter.rank, adapter.rank, device=lora_a.weight.device)
            inner = nn.Parameter(zeros)
            parameters[block_key(index)][adapter.name_r] = inner
            hooks.callback(parameters[block_key(index)].pop, adapter.name_r)
            hooks.callback(lora_a.register_forward_hook(partial(_through, inner)).remove)
        yield


def _through(inner: nn.Parameter, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    """Return R A x in place of A x."""
    return nn.functional.linear(output, inner)


def plain_tensors(
    adapters: AdapterPlan, key: str, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return one blob's tensors as those of plain LoRA: ``B R`` takes the place of B."""
    plain = dict(tensors)
    for index, adapter in adapters if adapters.bases else ():
        if block_key(index) == key:
            inner = plain.pop(adapter.name_r).to(torch.float64)
            product = plain[adapter.name_b].to(torch.float64) @ inner
            plain[adapter.name_b] = product.to(torch.float32)
    return plain
