"""LoRA adapters in a whole model.

peft inserts the adapters. Their values are read and set under canonical names, as on the wire.

With ``W`` the stored matrix and ``M`` its mask of non-zero weights, the forward pass uses ``W + M *
(scaling * B A)``. For this, the product of the factors is computed completely. A step therefore
takes additional memory of the size of the adapted matrices, and additional time.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from espalier.environment.imports import importing
from espalier.hf.families import Family
from espalier.hf.nf4.matrices import hush
from espalier.hf.opening.opened import OpenedModel
from espalier.hf.stream.edits import Edits, WeightEdit
from espalier.models.adapters import Adapter, AdapterPlan, Tensors
from espalier.models.plan import block_key
from pruning_kernels.lora.factors import Factors

if TYPE_CHECKING:
    from peft import LoraConfig


NAME = "default"
"""Name that peft gives to an adapter by default."""


def module_path(family: Family, index: int, linear: str) -> str:
    """Return the path of a block's matrix in the Hugging Face model."""
    return f"{family.blocks}.{index}.{family.linears[linear]}"


def lora_config(
    family: Family, adapters: AdapterPlan, num_blocks: int, dropout: float
) -> "LoraConfig":
    """Return peft's configuration of the adapters.

    ``target_modules`` holds module names if all blocks are adapted in the same way, and whole paths
    otherwise. It also holds paths if a name is the suffix of another module's path, such as BERT's
    ``output.dense`` and ``attention.output.dense``: peft would adapt both.

    Parameters
    ----------
    family : model family
    adapters : adapters of the run
    num_blocks : number of blocks of the model
    dropout : dropout probability of the input of the adapters
    """
    hush()
    with importing():
        from peft import LoraConfig

    blocks = {
        index: [adapter.linear.name for adapter in adapters.blocks[index]]
        for index in sorted(adapters.blocks)
    }
    first = next(iter(blocks.values()))
    alike = len(blocks) == num_blocks and all(names == first for names in blocks.values())
    chosen = [family.linears[name] for name in first]
    others = [path for name, path in family.linears.items() if name not in first]
    unmistakable = not any(other.endswith(f".{path}") for path in chosen for other in others)
    paths = {
        module_path(family, index, adapter.linear.name): adapter for index, adapter in adapters
    }
    usual = next(iter(paths.values()))
    return LoraConfig(
        task_type="CAUSAL_LM" if family.kind == "decoder" else "SEQ_CLS",
        r=usual.rank,
        lora_alpha=_alpha(usual),
        target_modules=chosen if alike and unmistakable else list(paths),
        lora_dropout=dropout,
        modules_to_save=(
            sorted(set(map(_saved_whole, family.head_linears.values()))) if adapters.head else None
        ),
        bias="none",
    )


def _saved_whole(path: str) -> str:
    """Return the module of a head that peft saves completely.

    peft always takes ``classifier`` with all its submodules.
    """
    return path.split(".")[0] if path.startswith("classifier") else path


def _alpha(adapter: Adapter) -> float:
    """Return peft's ``lora_alpha``, which peft divides by the rank.

    A whole number is returned as int, because other readers of peft's files expect one.
    """
    alpha = adapter.scaling * adapter.rank
    return int(alpha) if alpha.is_integer() else alpha


def put_in(
    whole: nn.Module, family: Family, adapters: AdapterPlan, num_blocks: int, dropout: float
) -> dict[str, dict[str, nn.Parameter]]:
    """Insert adapters into a whole model and return their parameters.

    The values are random values of peft; ``set_values`` sets others. Global random generators keep
    their state. A classification head that was trainable stays trainable.

    Returns
    -------
    dict
        Trainable float32 parameters by blob key and canonical name
    """
    hush()
    with importing():
        from peft import inject_adapter_in_model

    config = lora_config(family, adapters, num_blocks, dropout)
    # The head is trained in place; peft would make a copy.
    config.modules_to_save = None
    trainable = [parameter for parameter in whole.parameters() if parameter.requires_grad]
    # peft draws the initial values from the global generator, whose state must not change.
    with torch.random.fork_rng([]):
        inject_adapter_in_model(config, whole, adapter_name=NAME)
    # peft freezes all parameters that are not its own.
    for parameter in trainable:
        parameter.requires_grad_(True)
    parameters: dict[str, dict[str, nn.Parameter]] = {}
    for index, adapter in adapters:
        module: Any = whole.get_submodule(module_path(family, index, adapter.linear.name))
        block = parameters.setdefault(block_key(index), {})
        for name, factor in (
            (adapter.name_a, module.lora_A[NAME]),
            (adapter.name_b, module.lora_B[NAME]),
        ):
            factor.to(torch.float32)
            block[name] = factor.weight
    return parameters


@torch.no_grad()
def set_values(parameters: Mapping[str, Mapping[str, nn.Parameter]], tensors: Tensors) -> None:
    """Copy tensors into parameters with the same blob keys, names and shapes.

    Raises
    ------
    ValueError
        A tensor has another shape. ``copy_`` would broadcast the single row of an adapter of rank
        1.
    """
    for key, block in parameters.items():
        for name, parameter in block.items():
            if (found := tensors[key][name]).shape != parameter.shape:
                raise ValueError(
                    f"{key} {name} has shape {list(found.shape)}, but its parameter has"
                    f" {list(parameter.shape)}"
                )
            parameter.copy_(found)


def values(parameters: Mapping[str, Mapping[str, nn.Parameter]]) -> dict[str, dict[str, Tensor]]:
    """Return copies of the parameters' values on the CPU."""
    return {
        key: {name: parameter.detach().to("cpu", copy=True) for name, parameter in block.items()}
        for key, block in parameters.items()
    }


def factors_of(
    adapters: AdapterPlan, index: int, tensors: Mapping[str, Tensor]
) -> dict[str, Factors]:
    """Return the adapters of one block as factors, by canonical linear name."""
    return {
        adapter.linear.name: Factors(
            tensors[adapter.name_b], tensors[adapter.name_a], adapter.scaling
        )
        for adapter in adapters.blocks.get(index, ())
    }


def merged(
    block_factors: Callable[[int], Mapping[str, Factors]], keep_zeros: bool = False
) -> Edits:
    """Return edits that add the adapters' updates to the dense weights: ``W + scaling * B A``.

    The sum is computed in float32 and rounded to the dtype of the weight. With ``keep_zeros``
    weights that are zero stay zero.
    """

    def edits(index: int) -> dict[str, WeightEdit]:
        return {
            name: _Merging(factors, keep_zeros) for name, factors in block_factors(index).items()
        }

    return edits


class _Merging:
    def __init__(self, factors: Factors, keep_zeros: bool) -> None:
        self._factors = factors
        self._keep_zeros = keep_zeros

    @torch.no_grad()
    def __call__(self, weight: Tensor) -> Tensor:
        b, a = (
            factor.to(weight.device, torch.float32) for factor in (self._factors.b, self._factors.a)
        )
        updated = torch.addmm(weight.to(torch.float32), b, a, alpha=self._factors.scaling).to(
            weight.dtype
        )
        return updated.masked_fill_(weight == 0, 0) if self._keep_zeros else updated


def keep_zeros(model: OpenedModel, whole: nn.Module, adapters: AdapterPlan) -> None:
    """Mask the updates of all adapters in a whole model.

    Parameters
    ----------
    model : source of the matrices with their zeros
    whole : model in memory with adapters inserted
    adapters : adapters of the run
    """
    for index, adapter in adapters:
        module: Any = whole.get_submodule(module_path(model.family, index, adapter.linear.name))
        zeros = model.checkpoint.read(adapter.linear.parameter) == 0
        module.forward = _MaskedForward(module, zeros.to(module.lora_A[NAME].weight.device))


class _MaskedForward:
    """Replacement of peft's forward pass of one matrix."""

    def __init__(self, module: Any, zeros: Tensor) -> None:
        self._module = module
        self._zeros = zeros

    def __call__(self, inputs: Tensor) -> Tensor:
        """Map (..., in_features) to (..., out_features), in the dtype of the base's output."""
        module = self._module
        b = module.lora_B[NAME].weight
        a = module.lora_A[NAME].weight
        update = (module.scaling[NAME] * (b @ a)).masked_fill(self._zeros, 0)
        found: Tensor = module.base_layer(inputs)
        dropped = module.lora_dropout[NAME](inputs).to(update.dtype)
        return found + nn.functional.linear(dropped, update).to(found.dtype)
