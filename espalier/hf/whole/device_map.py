"""A whole model spread over several devices, whole blocks at a time, with accelerate."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from espalier.errors import InputError
from espalier.hf.families import Family


def placement(
    whole: nn.Module, family: Family, free: Sequence[int], dtype: torch.dtype, *, nf4: bool = False
) -> dict[str, int]:
    """Return the number of a device for each part of a model, in the order of the forward pass.

    Every device gets about the same number of bytes. Blocks are not divided. Raises InputError if
    the model does not fit.

    Parameters
    ----------
    whole : modules, which may be on the meta device
    free : free bytes of each device
    dtype : dtype of the weights
    nf4 : whether the linear layers of the blocks have 4 bits per weight

    Returns
    -------
    dict
        Device by path of a module; ``""`` is the whole model
    """
    from accelerate import infer_auto_device_map
    from accelerate.utils import CustomDtype, compute_module_sizes

    blocks = whole.get_submodule(family.blocks)
    quantised = [
        f"{family.module_path(index, linear)}.weight"
        for index, _ in enumerate(blocks.children())
        for linear in family.linears
    ]
    special = dict.fromkeys(quantised if nf4 else (), CustomDtype.INT4)
    sizes = compute_module_sizes(whole, dtype=dtype, special_dtypes=special)
    largest_part = max(
        size for path, size in sizes.items() if path and not _holds(path, family.blocks)
    )
    share = -(-sizes[""] // len(free)) + largest_part
    # accelerate keeps the largest part free on the first device, for weights that it moves.
    max_memory = {device: min(share, bytes_) for device, bytes_ in enumerate(free)}
    max_memory[0] = min(share + largest_part, free[0])
    device_map: dict[str, Any] = infer_auto_device_map(
        whole,
        max_memory=max_memory,
        no_split_module_classes=sorted({type(block).__name__ for block in blocks.children()}),
        dtype=dtype,
        special_dtypes=special,
    )
    if not all(isinstance(device, int) for device in device_map.values()):
        gib = " + ".join(f"{bytes_ / 2**30:.1f}" for bytes_ in free)
        raise InputError(
            f"device-map = 'auto': the model has {sizes[''] / 2**30:.1f} GiB, and the devices have"
            f" {gib} GiB free; choose training.base = 'bfloat16' or 'nf4', or more devices"
        )
    return device_map


def _holds(path: str, blocks: str) -> bool:
    """Return whether a module is the list of blocks or holds it."""
    return blocks == path or blocks.startswith(f"{path}.")


def device_of(
    path: str, places: Mapping[str, int], devices: Sequence[torch.device]
) -> torch.device:
    """Return the device of a module; a module without an entry has that of its parent."""
    while path not in places:
        if not path:
            return devices[0]
        path = path.rpartition(".")[0]
    return devices[places[path]]


def spread(whole: Any, places: Mapping[str, int], devices: Sequence[torch.device]) -> None:
    """Let a filled model move its hidden states from device to device.

    The output is on the device of the input.
    """
    from accelerate import dispatch_model

    device_map = {path: devices[number] for path, number in places.items()}
    dispatch_model(whole, device_map, main_device=devices[0], force_hooks=True)
