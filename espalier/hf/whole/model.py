"""Whole model in memory for tuning, with its base frozen in float32, bfloat16 or NF4.

The modules are built on the meta device and filled from the files tensor by tensor. Each tensor is
converted in pieces as it is read, so the only memory in addition to the model is one piece. In NF4
only the linears of the blocks are quantised, as in QLoRA; embeddings, norms, biases and a
language-model head stay in the compute dtype.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from espalier.hf.families import Family
from espalier.hf.files.tensor_names import missing_tensor, wrong_shape
from espalier.hf.files.tensor_pieces import converted
from espalier.hf.machine.computing import Computing, free_bytes
from espalier.hf.nf4.cache import quantised_linears
from espalier.hf.nf4.matrices import linear_of, tables
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.whole.device_map import device_of, placement, spread
from espalier.progress import report_each

Base = Literal["float32", "bfloat16", "nf4"]
"""Format of the frozen weights."""


def load_whole(
    model: OpenedModel,
    computing: Computing,
    base: Base,
    *,
    num_labels: int | None = None,
    seed: int = 0,
    cache_folder: Path | None = None,
) -> Any:
    """Load a whole model with a frozen base, in evaluation mode.

    Parameters
    ----------
    computing : device; with ``nf4`` also the dtype of the forward pass and of the weights that are
        not quantised
    num_labels : number of classes of an encoder; None for a decoder
    seed : seed of a new classification head. The head is always float32 and is trained; see
        ``head_parameters``
    cache_folder : node's cache of quantised weights; None quantises every time. Used only with
        ``nf4``

    Returns
    -------
    PreTrainedModel
        The model that ``AutoModelForCausalLM`` or ``AutoModelForSequenceClassification`` would
        return. With ``nf4`` the linears of its blocks are ``bitsandbytes.nn.Linear4bit``, and it
        has the attribute ``is_loaded_in_4bit`` for peft. Tied weights are one parameter.

    Raises
    ------
    InputError
        A tensor is missing, has another shape than ``config.json`` says or cannot be read;
        ``num_labels`` does not match the model family; transformers cannot build the model;
        bitsandbytes is not installed; the cache is not writable; or the model does not fit into the
        devices over which it is spread.
    """
    hf_model = model.new_skeleton(num_labels)
    computing.choose_attention(hf_model)
    sources = _sources(model, hf_model)
    dtype = computing.dtype if base == "nf4" else getattr(torch, base)
    device_map: dict[str, int] = {}
    if computing.spread:
        free_memory = [free_bytes(device) for device in computing.spread]
        device_map = placement(hf_model, model.family, free_memory, dtype, nf4=base == "nf4")
    # First, so that the blocks' linears are never in memory at full precision.
    if base == "nf4":
        _quantise_linears(model, hf_model, computing, cache_folder)
    _fill(model, hf_model, sources, dtype, computing, device_map)
    if model.family.kind == "encoder":
        _make_head(model, hf_model, seed, computing.device)
    if computing.spread:
        spread(hf_model, device_map, computing.spread)
    return hf_model.eval()


def head_parameters(family: Family, whole: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of the classification head by canonical name; empty for a decoder.

    The linears are ``head.dense`` (hidden_size, hidden_size) and ``head.out`` (num_labels,
    hidden_size), each with a bias, in float32. ``head.dense.weight`` is first.
    """
    return {
        f"{name}.{kind}": getattr(whole.get_submodule(path), kind)
        for name, path in family.head_linears.items()
        for kind in ("weight", "bias")
    }


def _sources(model: OpenedModel, hf_model: nn.Module) -> dict[str, str]:
    """Return the name in the files of each parameter of the base, after comparing shapes."""
    head = tuple(f"{path}." for path in model.family.head_linears.values())
    sources = {}
    for name, parameter in hf_model.named_parameters():
        if name.startswith(head):
            continue
        if (source := model.stored_name(name)) is None:
            raise missing_tensor(model, name)
        if model.checkpoint.tensors[source].shape != tuple(parameter.shape):
            raise wrong_shape(model, source, tuple(parameter.shape))
        sources[name] = source
    return sources


def _quantise_linears(
    model: OpenedModel,
    hf_model: nn.Module,
    computing: Computing,
    cache_folder: Path | None,
) -> None:
    """Replace the linears of the blocks by ``Linear4bit``; their biases stay on the meta device."""
    lookup = tables(computing.device)
    paths = {
        linear.parameter: model.family.module_path(block.index, linear.name)
        for block in model.plan.blocks
        for linear in block.linears
    }
    for linear, matrix in quantised_linears(model, computing.device, cache_folder):
        path = paths[linear.parameter]
        bias = hf_model.get_submodule(path).bias is not None
        hf_model.set_submodule(path, linear_of(matrix, lookup, computing.dtype, bias))
    # peft reads this attribute to decide whether to adapt Linear4bit.
    hf_model.is_loaded_in_4bit = True  # type: ignore[assignment]


def _fill(
    model: OpenedModel,
    hf_model: nn.Module,
    sources: dict[str, str],
    dtype: torch.dtype,
    computing: Computing,
    device_map: Mapping[str, int],
) -> None:
    """Assign frozen values to the parameters on the meta device, and move buffers to the device."""
    filled: dict[int, nn.Parameter] = {}
    for path, module in report_each(list(hf_model.named_modules()), "loading module"):
        device = device_of(path, device_map, computing.spread or (computing.device,))
        for name, parameter in module.named_parameters(recurse=False):
            full_name = f"{path}.{name}" if path else name
            if id(parameter) not in filled and parameter.is_meta and full_name in sources:
                value = converted(model.checkpoint, sources[full_name], dtype, device)
                filled[id(parameter)] = nn.Parameter(value, requires_grad=False)
            # A tied parameter is visited once per module that holds it.
            if id(parameter) in filled:
                setattr(module, name, filled[id(parameter)])
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def first_head(
    model: OpenedModel, whole: Any, seed: int, device: torch.device
) -> dict[str, Tensor]:
    """Return the initial values of the classification head by canonical name, float32.

    Values are random as in BERT: normal weights, zero biases. If the files hold a dense layer, its
    values are used. The last layer is always new, because the classes of a model that was tuned
    before are not those of the task. ``whole`` is the model or its skeleton.
    """
    generator = torch.Generator().manual_seed(seed)
    head = dict[str, Tensor]()
    for name, path in model.family.head_linears.items():
        linear = whole.get_submodule(path)
        fresh = (
            torch.randn(linear.weight.shape, generator=generator) * whole.config.initializer_range
        )
        values = {"weight": fresh, "bias": torch.zeros(linear.bias.shape)}
        for kind, value in values.items():
            source = model.stored_name(f"{path}.{kind}") if name == "head.dense" else None
            if source and model.checkpoint.tensors[source].shape == value.shape:
                value = converted(model.checkpoint, source, torch.float32, device)
            head[f"{name}.{kind}"] = value.to(device)
    return head


def _make_head(model: OpenedModel, hf_model: Any, seed: int, device: torch.device) -> None:
    values = first_head(model, hf_model, seed, device)
    for name, path in model.family.head_linears.items():
        linear = hf_model.get_submodule(path)
        linear.weight, linear.bias = (
            nn.Parameter(values[f"{name}.{kind}"]) for kind in ("weight", "bias")
        )
        linear.register_forward_pre_hook(_in_own_dtype)


def _in_own_dtype(linear: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Cast the input of the head to float32, because training steps are too small for bfloat16."""
    return (inputs[0].to(linear.weight.dtype), *inputs[1:])
