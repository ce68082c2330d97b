"""Plain Wanda (Sun et al. 2023): the whole model in memory, hooks, a stable sort of each row.

It is the reference for ``larger_than_memory``. Samples pass in the same batches as there, so that
results can be compared bit by bit: a matrix product may round differently in another batch.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from espalier.hf.families import Family


class _Enough(Exception):
    """Raised when the first block is reached, because only its inputs are needed."""


@torch.no_grad()
def prune(
    model: Any, family: Family, samples: Tensor, samples_at_once: int, layers: int
) -> Iterator[dict[str, Tensor]]:
    """Prune half of each row, block by block.

    Parameters
    ----------
    model : Hugging Face model on its device; pruned weights are set to zero
    family : names of its blocks and linears
    samples : calibration samples on that device, (samples, tokens), int64
    samples_at_once : number of samples that pass a block together
    layers : number of blocks to prune

    Yields
    ------
    dict
        Prune masks of a block by canonical linear name: bool, shape of the weights
    """
    blocks: Any = model.get_submodule(family.blocks)
    hidden, passed = _inputs_of_first(model, blocks[0], samples.split(samples_at_once))
    for block in list(blocks)[:layers]:
        linears = {name: block.get_submodule(path) for name, path in family.linears.items()}
        device = samples.device
        sums = {
            name: torch.zeros(one.in_features, dtype=torch.float64, device=device)
            for name, one in linears.items()
        }
        hooks = [
            linear.register_forward_pre_hook(_adding(sums[name]))
            for name, linear in linears.items()
        ]
        for states in hidden:
            block(states, **passed)
        for hook in hooks:
            hook.remove()
        masks = {}
        for name, linear in linears.items():
            scores = linear.weight.float().abs() * sums[name].sqrt().float()
            lowest = scores.sort(dim=1, stable=True).indices[:, : scores.shape[1] // 2]
            masks[name] = torch.zeros(
                scores.shape, dtype=torch.bool, device=scores.device
            ).scatter_(1, lowest, True)
            linear.weight[masks[name]] = 0
        hidden = [_first(block(states, **passed)) for states in hidden]
        yield masks


def _inputs_of_first(
    model: Any, block: nn.Module, batches: tuple[Tensor, ...]
) -> tuple[list[Tensor], dict[str, Any]]:
    """Return the hidden states before the first block, by batch, and its other arguments.

    The arguments are those of the first batch; batches have equal shapes.
    """
    hidden = []
    passed = list[dict[str, Any]]()

    def catch(_: nn.Module, inputs: tuple[Tensor, ...], named: dict[str, Any]) -> None:
        hidden.append(inputs[0])
        passed.append(named)
        raise _Enough

    hook = block.register_forward_pre_hook(catch, with_kwargs=True)
    for batch in batches:
        try:
            model(input_ids=batch, use_cache=False)
        except _Enough:
            continue
    hook.remove()
    return hidden, passed[0]


def _adding(total: Tensor) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
    def add(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        total.add_(inputs[0].flatten(0, -2).float().square().sum(dim=0, dtype=torch.float64))

    return add


def _first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output
