"""A whole model in memory for tuning: the Hugging Face model with its base frozen, in float32, bfloat16 or NF4.

The modules are built without memory, then filled from the files tensor by tensor, each converted in pieces as it is read:
what is in memory beyond the model itself is one piece. In NF4 only the linears of the blocks are quantised, as in QLoRA;
embeddings, norms, biases and a language model's head stay in the computing dtype.
"""

from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from espalier.hf.families import Family
from espalier.hf.files.tensor_faults import missing_tensor, wrong_shape
from espalier.hf.files.tensor_pieces import converted
from espalier.hf.machine.computing import Computing
from espalier.hf.nf4.cache import quantised_linears
from espalier.hf.nf4.matrices import linear_of, tables
from espalier.hf.opening.opened import OpenedModel
from espalier.progress.beats import beats

Base = Literal["float32", "bfloat16", "nf4"]
"""How the frozen weights are held."""


def load_whole(
    model: OpenedModel,
    computing: Computing,
    base: Base,
    *,
    num_labels: int | None = None,
    seed: int = 0,
    cache_folder: Path | None = None,
    double_quantisation: bool = True,
) -> Any:
    """Load a whole model, ready for a forward pass, in evaluation mode, with no parameter of the base asking for a gradient.

    Parameters
    ----------
    model : what is loaded
    computing : the device; with ``nf4`` also the dtype of the forward pass and of what is not quantised
    base : dtype of the weights, or ``nf4``
    num_labels : of an encoder, the number of classes; None for a decoder
    seed : of a new classification head. The head is float32 whatever the base, and is trained: see ``head_parameters``
    cache_folder : where a node keeps quantised weights between processes; None quantises every time. Used by ``nf4`` alone
    double_quantisation : of ``nf4``, see ``quantise``

    Returns
    -------
    What ``AutoModelForCausalLM`` or ``AutoModelForSequenceClassification`` would give; with ``nf4`` the linears of its blocks
    are ``bitsandbytes.nn.Linear4bit``, and peft finds it ``is_loaded_in_4bit``. Tied weights are one parameter.

    Raises
    ------
    Mistake
        A tensor is missing, has another shape than ``config.json`` says, or cannot be read; ``num_labels`` does not go with
        the family; transformers cannot build the model; bitsandbytes is not installed; the cache cannot be written.
    """
    whole = model.new_skeleton(num_labels)
    sources = _sources(model, whole)
    dtype = (
        computing.dtype
        if base == "nf4"
        else {"float32": torch.float32, "bfloat16": torch.bfloat16}[base]
    )
    if base == "nf4":
        _quantise_linears(model, whole, computing, cache_folder, double_quantisation)
    _fill(model, whole, sources, dtype, computing.device)
    if model.family.kind == "encoder":
        _make_head(model, whole, seed, computing.device)
    return whole.eval()


def head_parameters(family: Family, whole: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters of the classification head by canonical name, ``head.dense.weight`` first; none of a decoder's.

    Shapes: ``head.dense`` (hidden, hidden), ``head.out`` (labels, hidden), each with a bias; float32.
    """
    return {
        f"{name}.{kind}": getattr(whole.get_submodule(path), kind)
        for name, path in family.head_linears.items()
        for kind in ("weight", "bias")
    }


def _sources(model: OpenedModel, whole: nn.Module) -> dict[str, str]:
    """Parameter of the base -> name in the files, after shapes were compared; nothing is read yet."""
    head = tuple(f"{path}." for path in model.family.head_linears.values())
    sources = {}
    for name, wanted in whole.named_parameters():
        if name.startswith(head):
            continue
        if (source := model.stored_name(name)) is None:
            raise missing_tensor(model, name)
        if model.checkpoint.tensors[source].shape != tuple(wanted.shape):
            raise wrong_shape(model, source, tuple(wanted.shape))
        sources[name] = source
    return sources


def _quantise_linears(
    model: OpenedModel,
    whole: nn.Module,
    computing: Computing,
    cache_folder: Path | None,
    double_quantisation: bool,
) -> None:
    """Put ``Linear4bit`` in the place of the blocks' linears; their biases stay without memory."""
    family = model.family
    known = tables(computing.device)
    paths = {
        linear.parameter: f"{family.blocks}.{block.index}.{family.linears[linear.name]}"
        for block in model.plan.blocks
        for linear in block.linears
    }
    for linear, matrix in quantised_linears(
        model, computing.device, double_quantisation, cache_folder
    ):
        path = paths[linear.parameter]
        bias = whole.get_submodule(path).bias is not None
        whole.set_submodule(path, linear_of(matrix, known, computing.dtype, bias))
    whole.is_loaded_in_4bit = True  # type: ignore[assignment]  # where peft looks whether to adapt Linear4bit


def _fill(
    model: OpenedModel,
    whole: nn.Module,
    sources: dict[str, str],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Give parameters that have no memory their values, frozen, and bring buffers to the device."""
    filled: dict[int, nn.Parameter] = {}
    for path, module in beats(list(whole.named_modules()), "loading module"):
        for name, parameter in module.named_parameters(recurse=False):
            full = f"{path}.{name}" if path else name
            if id(parameter) not in filled and parameter.is_meta and full in sources:
                value = converted(model.checkpoint, sources[full], dtype, device)
                filled[id(parameter)] = nn.Parameter(value, requires_grad=False)
            if id(parameter) in filled:  # a tied one is met again
                setattr(module, name, filled[id(parameter)])
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def first_head(
    model: OpenedModel, whole: Any, seed: int, device: torch.device
) -> dict[str, Tensor]:
    """First values of the classification head, float32, by canonical name: random as in BERT (normal, zero biases).

    A dense layer that the files hold is taken from there. The last layer is always new: the classes of a model that was tuned
    before are not those of the task.

    Parameters
    ----------
    whole : the model, or its skeleton without values, which says shapes and the width of the normal distribution
    """
    generator = torch.Generator().manual_seed(seed)
    found = dict[str, Tensor]()
    for name, path in model.family.head_linears.items():
        linear = whole.get_submodule(path)
        fresh = (
            torch.randn(linear.weight.shape, generator=generator) * whole.config.initializer_range
        )
        values = {"weight": fresh, "bias": torch.zeros(linear.bias.shape)}
        stored = {kind: model.stored_name(f"{path}.{kind}") for kind in values}
        for kind, source in stored.items():
            if (
                name == "head.dense"
                and source
                and model.checkpoint.tensors[source].shape == values[kind].shape
            ):
                values[kind] = converted(model.checkpoint, source, torch.float32, device)
            found[f"{name}.{kind}"] = values[kind].to(device)
    return found


def _make_head(model: OpenedModel, whole: Any, seed: int, device: torch.device) -> None:
    values = first_head(model, whole, seed, device)
    for name, path in model.family.head_linears.items():
        linear = whole.get_submodule(path)
        linear.weight, linear.bias = (
            nn.Parameter(values[f"{name}.{kind}"]) for kind in ("weight", "bias")
        )
        linear.register_forward_pre_hook(_in_own_dtype)


def _in_own_dtype(linear: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The head computes in float32 also where the encoder gives it bfloat16: its steps are too small for the latter."""
    return (inputs[0].to(linear.weight.dtype), *inputs[1:])
