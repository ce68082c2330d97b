"""Model loaded by plain transformers whose weights stay on disk until a module computes.

``from_pretrained`` with ``device_map="disk"`` determines which file holds each tensor, its name
there, and which tensors are tied. Hooks read a module's weights before its forward pass and drop
them afterwards. Peak memory is therefore the size of the largest module, regardless of the number
of blocks.
"""

import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from tempfile import mkdtemp
from typing import Any
from weakref import finalize

import torch
from torch import Tensor, nn

from espalier.hf.files.dtypes import TORCH_DTYPES
from espalier.hf.nf4.checkpoint import QuantisedCheckpoint
from espalier.hf.opening.opened_model import ANY_LABELS, OpenedModel, forget_named_code
from espalier.hf.structured.configuration import load_config

Weights = Callable[[str], Tensor]
"""Function from the full name of a parameter to its value on the CPU."""


def load_plain(
    model: OpenedModel,
    dtype: torch.dtype,
    device: torch.device,
    num_labels: int | None = None,
    in_memory: bool = False,
) -> tuple[Any, dict[str, Any]]:
    """Load a model directory with plain ``from_pretrained``, in evaluation mode.

    Parameters
    ----------
    model : the opened directory
    dtype : dtype of the weights
    device : device of the computation
    num_labels : number of classes of an encoder's new head; None for a decoder, or to load the head
    in_memory : True loads all weights; False leaves them in the files and reads them when a module
        computes. Weights that the files hold in NF4 are always loaded, in 4 bits, because
        bitsandbytes cannot read them module by module

    Returns
    -------
    tuple
        The model, and the loading information of transformers: ``missing_keys``,
        ``unexpected_keys`` and so on
    """
    # Warnings of the libraries are replaced by checks here.
    with _quiet():
        if in_memory or isinstance(model.checkpoint, QuantisedCheckpoint):
            hf_model, loading = _from_pretrained(model, num_labels, dtype=dtype)
            return hf_model.to(device).eval(), loading
        return _on_disk(model, dtype, device, num_labels)


def _from_pretrained(model: OpenedModel, num_labels: int | None, **options: Any) -> Any:
    import transformers

    safe_options = {"local_files_only": True, "trust_remote_code": False}
    labels = {} if num_labels is None else {"num_labels": num_labels}
    config = load_config(model.directory, **labels)
    # ``config.json`` may name code that transformers would download and run.
    forget_named_code(config)
    auto_class = getattr(transformers, model.family.auto_class)
    return auto_class.from_pretrained(
        model.directory, config=config, output_loading_info=True, **safe_options, **options
    )


def _on_disk(
    model: OpenedModel, dtype: torch.dtype, device: torch.device, num_labels: int | None
) -> tuple[Any, dict[str, Any]]:
    """Load a model in the dtype of its files, with its weights on disk.

    transformers reads tensors at load time only to convert them, so no conversion is requested.
    """
    # Without conversion transformers reads no tensor now.
    stored = TORCH_DTYPES[model.plan.blocks[0].linears[0].dtype]
    # A new head is in no file.
    kept = () if num_labels is None else tuple(model.family.head_linears.values())
    any_labels = ANY_LABELS if model.family.kind == "encoder" else None
    skeleton = model.new_skeleton(num_labels or any_labels)
    # Modules with tensors of their own, one by one; a new head is made in memory.
    device_map = {path: "cpu" if path in kept else "disk" for path, _ in _with_tensors(skeleton)}
    options: dict[str, Any] = {"dtype": stored, "device_map": device_map}
    if model.family.experts:
        # transformers writes the stacked experts of a block to files of its own.
        options["offload_folder"] = mkdtemp(prefix="espalier-experts-")
    hf_model, loading = _from_pretrained(model, num_labels, **options)
    if model.family.experts:
        finalize(hf_model, shutil.rmtree, options["offload_folder"], ignore_errors=True)
    # The hooks hold the map of weights, so it is read before they are removed.
    weights = _weights_of(hf_model)
    _unhook(hf_model)
    for parameter in hf_model.parameters():
        parameter.requires_grad_(False)
        if parameter.is_floating_point():
            # Weights on disk are meta tensors here, of which only the dtype changes.
            parameter.data = parameter.data.to(dtype)
    _take_computed_buffers(hf_model, skeleton)
    read_when_used(hf_model, weights, device, kept)
    return hf_model.eval(), loading


def _take_computed_buffers(hf_model: nn.Module, skeleton: nn.Module) -> None:
    """Replace the buffers that are in no file by those of a model without a stored dtype.

    Loading rounds them to the dtype of the files, such as Gemma's scale of the embeddings.
    """
    for path, module in skeleton.named_modules():
        for name in module._non_persistent_buffers_set:
            setattr(hf_model.get_submodule(path), name, getattr(module, name))


def _with_tensors(hf_model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the path and module of each module that has parameters or buffers of its own."""
    for path, module in hf_model.named_modules():
        if any(True for _ in (*module.parameters(recurse=False), *module.buffers(recurse=False))):
            yield path, module


def _weights_of(hf_model: nn.Module) -> Weights:
    """Return the tensors in the files by parameter name, as transformers mapped them."""
    hooks = (getattr(module, "_hf_hook", None) for module in hf_model.modules())
    maps = (getattr(hook, "weights_map", None) for hook in hooks)
    dataset = next(weights for weights in maps if weights is not None).dataset
    # The map's dtype would convert tensors that differ from the model's first one.
    for entry in dataset.index.values():
        if "safetensors_file" in entry:
            # Otherwise a float32 norm in a model of bfloat16 matrices would be rounded.
            entry.pop("dtype", None)
    # mypy takes an unknown attribute of a module for a Tensor.
    ties: dict[str, str] = getattr(hf_model, "all_tied_weights_keys")  # noqa: B009
    for pair in ties.items():
        # In both directions: either of a pair may be in the files.
        for name, partner in (pair, reversed(pair)):
            # The files hold only one tensor of a tied pair.
            if name not in dataset.index and partner in dataset.index:
                dataset.index[name] = {"weight_name": partner, **dataset.index[partner]}
    weights: Weights = dataset.__getitem__
    return weights


def _unhook(hf_model: nn.Module) -> None:
    """Remove accelerate's hooks, which would compute on the CPU, and its device map.

    peft would read the device map to find out whether weights are offloaded.
    """
    # accelerate's hooks are replaced by those of ``read_when_used``.
    from accelerate.hooks import remove_hook_from_submodules

    remove_hook_from_submodules(hf_model)
    del hf_model.hf_device_map


def read_when_used(
    whole: nn.Module, weights: Weights, device: torch.device, kept: tuple[str, ...] = ()
) -> None:
    """Let each module read its parameters when it is called, and drop them afterwards.

    Parameters
    ----------
    whole : the model
    weights : source of the parameters; they are cast to the present dtype of the parameter
    device : device of the computation
    kept : paths of modules whose parameters are in memory; they are moved to the device and stay
        there
    """
    for path, module in list(_with_tensors(whole)):
        # Modules in memory, such as a new head.
        if path in kept:
            module.to(device)
            continue
        # Buffers are small and stay on the device.
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
        _read_when_called(module, f"{path}." if path else "", weights, device)


def _read_when_called(
    module: nn.Module, prefix: str, weights: Weights, device: torch.device
) -> None:
    placeholders = {}
    for name, parameter in module.named_parameters(recurse=False):
        # A single zero on the device, expanded to the shape: peft asks weights for their device.
        zero = torch.zeros((), dtype=parameter.dtype, device=device)
        placeholders[name] = nn.Parameter(zero.expand(parameter.shape), requires_grad=False)

    def read(module: nn.Module, *_: Any) -> None:
        for name, placeholder in placeholders.items():
            value = weights(f"{prefix}{name}").to(placeholder.dtype).to(device)
            setattr(module, name, nn.Parameter(value, requires_grad=False))

    def drop(module: nn.Module, *_: Any) -> None:
        for name, placeholder in placeholders.items():
            setattr(module, name, placeholder)

    # Until the first call the module holds placeholders too.
    drop(module)
    module.register_forward_pre_hook(read)
    # always_call drops the weights after an exception too.
    module.register_forward_hook(drop, always_call=True)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers and accelerate: checks here replace their warnings; no progress bars."""
    from transformers.utils import logging as transformers_logging

    accelerate = logging.getLogger("accelerate.big_modeling")
    saved_levels = (transformers_logging.get_verbosity(), accelerate.level)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    accelerate.setLevel(logging.ERROR)
    try:
        yield
    finally:
        transformers_logging.set_verbosity(saved_levels[0])
        accelerate.setLevel(saved_levels[1])
