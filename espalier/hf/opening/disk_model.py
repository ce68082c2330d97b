"""Model loaded by plain transformers whose weights stay on disk until a module computes.

``from_pretrained`` with ``device_map="disk"`` determines which file holds each tensor, its name
there, and which tensors are tied. Hooks read a module's weights before its forward pass and drop
them afterwards. Peak memory is therefore the size of the largest module, regardless of the number
of blocks.
An attention implementation that ``config.json`` names is ignored: code of the hub would be
fetched and run.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from espalier.hf.files.tensor_pieces import TORCH_DTYPES
from espalier.hf.nf4.checkpoint import QuantisedCheckpoint
from espalier.hf.opening.opened import OpenedModel, forget_named_code, names_code
from espalier.hf.stream.edits import Edits

ANY_LABELS = 2
"""Number of classes of a skeleton from which only module names are taken."""


class ReloadError(RuntimeError):
    """Error for a directory that lacks something that transformers needs to build its model."""


def plain_model(
    auto_class: Any,
    directory: Path,
    dtype: torch.dtype,
    device: torch.device,
    **given: Any,
) -> Any:
    """Load a model with ``load_plain`` and require that no tensor is missing.

    The tensors of an encoder's new classification head may be missing.

    Parameters
    ----------
    auto_class, dtype, device, given : see ``load_plain``
    directory : directory of the model

    Raises
    ------
    ReloadError
        A tensor is missing.
    """
    model = OpenedModel(directory)
    whole, found = load_plain(auto_class, model, dtype, device, **given)
    head = _own_head(model, given)
    if missing := sorted(
        name for name in found["missing_keys"] if name.rpartition(".")[0] not in head
    ):
        raise ReloadError(f"transformers finds no tensor {missing[0]} in it")
    return whole


def load_plain(
    auto_class: Any,
    model: OpenedModel,
    dtype: torch.dtype,
    device: torch.device,
    *,
    in_memory: bool = False,
    **given: Any,
) -> tuple[Any, dict[str, Any]]:
    """Load a model directory with plain ``from_pretrained``, in evaluation mode.

    Parameters
    ----------
    auto_class : one of transformers' ``AutoModelFor...`` classes
    model : the opened directory
    dtype : dtype of the weights
    device : device of the computation
    in_memory : True loads all weights; False leaves them in the files and reads them when a module
        computes. Weights that the files hold in NF4 are always loaded, in 4 bits, because
        bitsandbytes cannot read them module by module
    given : further arguments of ``from_pretrained``

    Returns
    -------
    tuple
        The model, and the loading information of transformers: ``missing_keys``,
        ``unexpected_keys`` and so on
    """
    given = {
        "local_files_only": True,
        "trust_remote_code": False,
        "output_loading_info": True,
        **given,
    }
    with quiet():
        if in_memory or isinstance(model.checkpoint, QuantisedCheckpoint):
            whole, found = _from_pretrained(auto_class, model, dtype=dtype, **given)
            return whole.to(device).eval(), found
        return _on_disk(auto_class, model, dtype, device, given)


def _from_pretrained(auto_class: Any, model: OpenedModel, **given: Any) -> Any:
    """Call ``from_pretrained``, without the attention code that the configuration names."""
    if not names_code(model.config):
        return auto_class.from_pretrained(model.directory, **given)
    from transformers import AutoConfig

    labels = {"num_labels": given.pop("num_labels")} if "num_labels" in given else {}
    config = AutoConfig.from_pretrained(
        model.directory, local_files_only=True, trust_remote_code=False, **labels
    )
    forget_named_code(config)
    return auto_class.from_pretrained(model.directory, config=config, **given)


def _own_head(model: OpenedModel, given: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the module paths of an encoder's head, which may be new and is then in memory."""
    return tuple(model.family.head_linears.values()) if "num_labels" in given else ()


def _on_disk(
    auto_class: Any,
    model: OpenedModel,
    dtype: torch.dtype,
    device: torch.device,
    given: Mapping[str, Any],
) -> tuple[Any, dict[str, Any]]:
    """Load a model in the dtype of its files, with its weights on disk.

    transformers reads tensors at load time only to convert them, so no conversion is requested.
    """
    stored = TORCH_DTYPES[model.plan.blocks[0].linears[0].dtype]
    kept = _own_head(model, given)
    any_labels = ANY_LABELS if model.family.kind == "encoder" else None
    parts = [
        path for path, _ in _with_tensors(model.new_skeleton(given.get("num_labels") or any_labels))
    ]
    device_map = {path: "cpu" if path in kept else "disk" for path in parts}
    whole, found = _from_pretrained(auto_class, model, dtype=stored, device_map=device_map, **given)
    # The hooks hold the map of weights, so it is read before they are removed.
    weights = _weights_of(whole)
    _unhook(whole)
    for parameter in whole.parameters():
        parameter.requires_grad_(False)
        if parameter.is_floating_point():
            # Weights on disk are meta tensors here, of which only the dtype changes.
            parameter.data = parameter.data.to(dtype)
    read_when_used(whole, weights, device, kept)
    return whole.eval(), found


def _with_tensors(whole: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the path and module of each module that has parameters or buffers of its own."""
    for path, module in whole.named_modules():
        if any(True for _ in (*module.parameters(recurse=False), *module.buffers(recurse=False))):
            yield path, module


def _weights_of(whole: nn.Module) -> Mapping[str, Tensor]:
    """Return the tensors in the files by parameter name, as transformers mapped them."""
    hooks = (getattr(module, "_hf_hook", None) for module in whole.modules())
    maps = (getattr(hook, "weights_map", None) for hook in hooks)
    found = next(weights for weights in maps if weights is not None).dataset
    for place in found.index.values():
        if "safetensors_file" in place:
            # Otherwise a float32 norm in a model of bfloat16 matrices would be rounded.
            place.pop("dtype", None)
    # mypy takes an unknown attribute of a module for a Tensor.
    ties: dict[str, str] = getattr(whole, "all_tied_weights_keys")  # noqa: B009
    for pair in ties.items():
        for name, other in (pair, reversed(pair)):
            # The files hold only one tensor of a tied pair.
            if name not in found.index and other in found.index:
                found.index[name] = {"weight_name": other, **found.index[other]}
    tensors: Mapping[str, Tensor] = found
    return tensors


def _unhook(whole: nn.Module) -> None:
    """Remove accelerate's hooks, which would compute on the CPU, and its device map.

    peft would read the device map to find out whether weights are offloaded.
    """
    from accelerate.hooks import remove_hook_from_submodules

    remove_hook_from_submodules(whole)
    del whole.hf_device_map


def read_when_used(
    whole: nn.Module,
    weights: Mapping[str, Tensor],
    device: torch.device,
    kept: tuple[str, ...] = (),
) -> None:
    """Let each module read its parameters when it is called, and drop them afterwards.

    Between calls each parameter is a single zero on the device, expanded to its shape, because peft
    asks weights for their device.

    Parameters
    ----------
    whole : the model
    weights : tensors by full parameter name; they are cast to the present dtype of the parameter
    device : device of the computation
    kept : paths of modules whose parameters are in memory; they are moved to the device and stay
        there
    """
    for path, module in list(_with_tensors(whole)):
        if path in kept:
            module.to(device)
            continue
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
        _Reader(module, f"{path}." if path else "", weights, device)


class _Reader:
    """Hooks of one module that read its own parameters before a call and drop them afterwards."""

    def __init__(
        self, module: nn.Module, prefix: str, weights: Mapping[str, Tensor], device: torch.device
    ) -> None:
        self._prefix = prefix
        self._weights = weights
        self._device = device
        self._dtypes = {
            name: parameter.dtype for name, parameter in module.named_parameters(recurse=False)
        }
        self._placeholders: dict[str, nn.Parameter] = {}
        for name, parameter in module.named_parameters(recurse=False):
            zero = torch.zeros((), dtype=parameter.dtype, device=device)
            self._placeholders[name] = nn.Parameter(
                zero.expand(parameter.shape), requires_grad=False
            )
        self.drop(module)
        module.register_forward_pre_hook(self.read)
        # always_call drops the weights after an exception too.
        module.register_forward_hook(self.drop, always_call=True)

    def read(self, module: nn.Module, *_: Any) -> None:
        """Read the parameters from the files."""
        for name, dtype in self._dtypes.items():
            value = self._weights[f"{self._prefix}{name}"].to(dtype).to(self._device)
            setattr(module, name, nn.Parameter(value, requires_grad=False))

    def drop(self, module: nn.Module, *_: Any) -> None:
        """Restore the placeholders."""
        for name, placeholder in self._placeholders.items():
            setattr(module, name, placeholder)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers and accelerate: checks here replace their warnings; no progress bars."""
    from transformers.utils import logging as transformers_logging

    accelerate = logging.getLogger("accelerate.big_modeling")
    before = transformers_logging.get_verbosity(), accelerate.level
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    accelerate.setLevel(logging.ERROR)
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before[0])
        accelerate.setLevel(before[1])


class EditedWeights(Mapping[str, Tensor]):
    """Tensors of an encoder with a classification head, edited when they are read.

    Parameters
    ----------
    model : the base encoder
    edits : changes to its weights
    head : tensors of the head by transformers' name, such as ``classifier.out_proj.weight``
    """

    def __init__(self, model: OpenedModel, edits: Edits, head: Mapping[str, Tensor]) -> None:
        self._model = model
        self._edits = edits
        self._head = head
        self._owner = {
            own.parameter: (block.index, own.name)
            for block in model.plan.blocks
            for own in block.linears
        }

    def __getitem__(self, name: str) -> Tensor:
        """Read one tensor and apply its edit."""
        if name in self._head:
            return self._head[name]
        stored = self._model.stored_name(name)
        if stored is None:
            raise KeyError(name)
        value = self._model.checkpoint.read(stored)
        if stored in self._owner:
            index, linear = self._owner[stored]
            edit = self._edits(index).get(linear)
            value = edit(value) if edit else value
        return value

    def __iter__(self) -> Iterator[str]:
        yield from (*self._model.checkpoint.tensors, *self._head)

    def __len__(self) -> int:
        return len(self._model.checkpoint.tensors) + len(self._head)
