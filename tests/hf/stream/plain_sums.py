"""Wanda and RIA on pooled samples by plain transformers: hooks, float64 sums and sorted scores.

Nothing here is shared with the program. Samples of a client run in one batch, as at its site.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM


def plain_model(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def matrices_of(model: Any) -> list[dict[str, Any]]:
    """Return the linears of each block by the name of their weights."""
    return [
        {
            f"model.layers.{index}.{name}.weight": module
            for name, module in layer.named_modules()
            if isinstance(module, torch.nn.Linear)
        }
        for index, layer in enumerate(model.model.layers)
    ]


@torch.no_grad()
def sums_of_batch(model: Any, samples: Tensor, per_batch: int = 0) -> dict[str, Tensor]:
    """Return the float64 sums of squared inputs of one client, by name of the weights."""
    sums: dict[str, Tensor] = {}

    def add(name: str, inputs: Tensor) -> None:
        squares = inputs.reshape(-1, inputs.shape[-1]).double().square().sum(dim=0)
        sums[name] = sums[name] + squares if name in sums else squares

    hooks = [
        module.register_forward_pre_hook(lambda _, given, name=name: add(name, given[0]))
        for block in matrices_of(model)
        for name, module in block.items()
    ]
    for batch in samples.split(per_batch or len(samples)):
        model(input_ids=batch, use_cache=False)
    for hook in hooks:
        hook.remove()
    return sums


def pooled(
    model: Any, clients: Sequence[Tensor], weighting: str, per_batch: int
) -> dict[str, Tensor]:
    total: dict[str, Tensor] = {}
    for samples in clients:
        for name, sums in sums_of_batch(model, samples, per_batch).items():
            own = sums / samples.numel() if weighting == "equal" else sums
            total[name] = total[name] + own if name in total else own
    return total


def plain_sums(path: Path, clients: Sequence[Tensor]) -> dict[str, Tensor]:
    return pooled(plain_model(path), clients, "tokens", 0)


def scores_of(weight: Tensor, sums: Tensor, metric: str) -> Tensor:
    """Return Wanda's or RIA's scores, float32, with every operation rounded to float32."""
    size = weight.float().abs()
    norms = sums.sqrt().float()
    if metric == "wanda":
        return size * norms
    rows = size.sum(dim=1, keepdim=True)
    # Partial sums of 64 rows, as documented in ``ria_sums``.
    columns = torch.stack([part.sum(dim=0).double() for part in size.split(64)]).sum(dim=0).float()
    return (size / rows + size / columns) * norms.sqrt()


def lowest(scores: Tensor, group: str, sparsity: float) -> Tensor:
    """Return the mask of the lowest scores of each group, by stable sorting."""
    rows, columns = scores.shape
    if ":" in group:
        kept, size = map(int, group.split(":"))
        lines, quota = scores.reshape(-1, size), size - kept
    elif group == "layer":
        lines, quota = scores.reshape(1, -1), int(rows * columns * sparsity)
    elif group == "row":
        lines, quota = scores, int(columns * sparsity)
    else:
        lines, quota = scores.T.contiguous(), int(rows * sparsity)
    order = lines.sort(dim=1, stable=True).indices[:, :quota]
    mask = torch.zeros(lines.shape, dtype=torch.bool).scatter_(1, order, True)
    return (mask.T if group == "column" else mask).reshape(rows, columns)


def plain_mask(weight: Tensor, sums: Tensor, metric: str, group: str, sparsity: float) -> Tensor:
    """Return the mask of a matrix."""
    # Within a column all of Wanda's scores have the same factor.
    same = group == "column" and metric == "wanda"
    return lowest(
        scores_of(weight, torch.ones_like(sums) if same else sums, metric), group, sparsity
    )


@torch.no_grad()
def plain_masks(
    path: Path,
    clients: Sequence[Tensor],
    metric: str,
    group: str,
    sparsity: float,
    weighting: str,
    *,
    sequential: bool,
    per_batch: int = 0,
) -> dict[str, Tensor]:
    """Return the masks, bool, by name of the weights.

    With ``sequential`` the sums of each block are taken behind the blocks that are pruned already.
    """
    model = plain_model(path)
    sums = pooled(model, clients, weighting, per_batch)
    masks = {}
    for block in matrices_of(model):
        if sequential:
            sums = pooled(model, clients, weighting, per_batch)
        for name, module in block.items():
            masks[name] = plain_mask(module.weight, sums[name], metric, group, sparsity)
        if sequential:
            for name, module in block.items():
                module.weight[masks[name]] = 0
    return masks
