"""LoRA adapters in a whole model.

peft inserts the adapters. Their values are read and set under canonical names, as on the wire.

With ``W`` the stored matrix and ``M`` its mask of non-zero weights, the forward pass uses ``W + M *
(scaling * B A)``. For this, the product of the factors is computed completely. A step therefore
takes additional memory of the size of the adapted matrices, and additional time.
"""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from espalier.environment.imports import importing
from espalier.hf.families import Family
from espalier.hf.nf4.matrices import silence_bitsandbytes
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.stream.edits import Edits, WeightEdit
from espalier.models.adapters import AdapterPlan, Tensors
from espalier.models.plan import block_key
from pruning_kernels.lora.factors import Factors

if TYPE_CHECKING:
    from peft import LoraConfig


NAME = "default"
"""Name that peft gives to an adapter by default."""


def lora_config(
    family: Family, adapters: AdapterPlan, num_blocks: int, dropout: float
) -> "LoraConfig":
    """Return peft's configuration of the adapters.

    ``target_modules`` holds module names if all blocks are adapted in the same way, and whole paths
    otherwise. It also holds paths if a name is the suffix of another module's path, such as BERT's
    ``output.dense`` and ``attention.output.dense``: peft would adapt both.
    """
    silence_bitsandbytes()
    with importing():
        from peft import LoraConfig

    blocks = {
        index: [adapter.linear.name for adapter in adapters.blocks[index]]
        for index in sorted(adapters.blocks)
    }
    first = next(iter(blocks.values()))
    is_uniform = len(blocks) == num_blocks and all(names == first for names in blocks.values())
    suffixes = [family.linears[name] for name in first]
    other_suffixes = [path for name, path in family.linears.items() if name not in first]
    is_unambiguous = not any(
        suffix.endswith(f".{path}") for path in suffixes for suffix in other_suffixes
    )
    paths = {family.module_path(index, adapter.linear.name): adapter for index, adapter in adapters}
    first_adapter = next(iter(paths.values()))
    alpha = first_adapter.scaling * first_adapter.rank
    # peft always saves ``classifier`` with all its submodules.
    saved = {
        path.split(".")[0] if path.startswith("classifier") else path
        for path in family.head_linears.values()
    }
    return LoraConfig(
        task_type="CAUSAL_LM" if family.kind == "decoder" else "SEQ_CLS",
        r=first_adapter.rank,
        # Other readers of peft's files expect an int.
        lora_alpha=int(alpha) if alpha.is_integer() else alpha,
        target_modules=suffixes if is_uniform and is_unambiguous else list(paths),
        lora_dropout=dropout,
        modules_to_save=sorted(saved) if adapters.head else None,
        bias="none",
    )


def put_in(
    whole: nn.Module, family: Family, adapters: AdapterPlan, num_blocks: int, dropout: float
) -> dict[str, dict[str, nn.Parameter]]:
    """Insert adapters into a whole model; return float32 parameters by key and canonical name.

    The values are random values of peft; ``set_values`` sets others. Global random generators keep
    their state. A classification head that was trainable stays trainable.
    """
    silence_bitsandbytes()
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
        module: Any = whole.get_submodule(family.module_path(index, adapter.linear.name))
        block = parameters.setdefault(block_key(index), {})
        block[adapter.name_a] = module.lora_A[NAME].to(torch.float32).weight
        block[adapter.name_b] = module.lora_B[NAME].to(torch.float32).weight
    return parameters


@torch.no_grad()
def set_values(parameters: Mapping[str, Mapping[str, nn.Parameter]], tensors: Tensors) -> None:
    """Copy tensors into parameters with the same blob keys, names and shapes, else ValueError."""
    for key, block in parameters.items():
        for name, parameter in block.items():
            # ``copy_`` would broadcast the single row of an adapter of rank 1.
            if (tensor := tensors[key][name]).shape != parameter.shape:
                raise ValueError(
                    f"{key} {name} has shape {list(tensor.shape)}, but its parameter has"
                    f" {list(parameter.shape)}"
                )
            parameter.copy_(tensor)


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


def merged(adapters: AdapterPlan, tensors: Tensors) -> Edits:
    """Return edits that add the adapters' updates to the dense weights; see ``updated``.

    Blocks without tensors are not changed.
    """

    def edits(index: int) -> dict[str, WeightEdit]:
        block_tensors = tensors.get(block_key(index))
        factors = {} if block_tensors is None else factors_of(adapters, index, block_tensors)
        return {
            name: partial(updated, adapter_factors, adapters.keep_zeros)
            for name, adapter_factors in factors.items()
        }

    return edits


@torch.no_grad()
def updated(factors: Factors, keep_zeros: bool, weight: Tensor) -> Tensor:
    """Return ``W + scaling * B A``, computed in float32, in the dtype of the weight.

    With ``keep_zeros`` weights that are zero stay zero.
    """
    b = factors.b.to(weight.device, torch.float32)
    a = factors.a.to(weight.device, torch.float32)
    exact = torch.addmm(weight.to(torch.float32), b, a, alpha=factors.scaling)
    result = exact.to(weight.dtype)
    return result.masked_fill_(weight == 0, 0) if keep_zeros else result


def keep_zeros(model: OpenedModel, whole: nn.Module, adapters: AdapterPlan) -> None:
    """Mask the updates of all adapters in a whole model where the files of ``model`` have zeros."""
    for index, adapter in adapters:
        module: Any = whole.get_submodule(model.family.module_path(index, adapter.linear.name))
        zeros = model.checkpoint.read(adapter.linear.parameter) == 0
        module.forward = partial(
            _masked_forward, module, zeros.to(module.lora_A[NAME].weight.device)
        )


def _masked_forward(module: Any, zeros: Tensor, inputs: Tensor) -> Tensor:
    """Do what peft's forward pass of one matrix does, with a masked update."""
    product = module.lora_B[NAME].weight @ module.lora_A[NAME].weight
    update = (module.scaling[NAME] * product).masked_fill(zeros, 0)
    output: Tensor = module.base_layer(inputs)
    dropped = module.lora_dropout[NAME](inputs).to(update.dtype)
    return output + nn.functional.linear(dropped, update).to(output.dtype)
