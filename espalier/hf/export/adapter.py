"""Export of adapters in peft's format, and a check that plain peft loads them on the base model."""

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save
from torch import Tensor

from espalier.hf.export.model import (
    ExportError,
    logits_of,
    made_whole,
    require_close,
    require_finite,
    whole_logits,
    write_card,
)
from espalier.hf.machine.computing import Computing
from espalier.hf.nf4.matrices import hush
from espalier.hf.opening.disk_model import EditedWeights, plain_model, read_when_used
from espalier.hf.opening.model_files import public_name
from espalier.hf.opening.opened import OpenedModel
from espalier.hf.stream.block_stream import BlockStream
from espalier.hf.stream.edits import Edits, WeightEdit
from espalier.hf.whole.adapters import NAME, lora_config, module_path
from espalier.models.adapters import HEAD_KEY, AdapterPlan
from espalier.models.plan import block_key
from espalier.storage.atomic import write_bytes, write_json

if TYPE_CHECKING:
    from peft import LoraConfig

BlobTensors = Callable[[str], Mapping[str, Tensor]]
"""Function from a blob key to its tensors: float32, by canonical name."""

CPU = torch.device("cpu")
UPDATE_TOLERANCE = 1e-4
"""Allowed difference of an update, relative to its largest value.

Two float32 products of the same factors differ by rounding.
"""


def export_adapter(
    model: OpenedModel, adapters: AdapterPlan, tensors: BlobTensors, target: Path, card: str = ""
) -> None:
    """Write ``adapter_config.json``, ``adapter_model.safetensors`` and the card.

    The directory is written atomically: it appears complete or not at all. The same adapters give
    the same bytes. The configuration names the base model as others know it (``public_name``), not
    by its local path. To use the adapter, load the base first, then call
    ``PeftModel.from_pretrained(base, adapter)``.

    Parameters
    ----------
    model : the base model
    adapters : adapters of the run
    tensors : trained values by blob key
    target : directory to write
    card : content of ``README.md``; an empty string writes none

    Raises
    ------
    InputError
        Writing failed.
    ValueError
        Other tensors than those of a classification head are trained whole.
    """
    if beside := sorted(set(adapters.whole) - {HEAD_KEY}):
        raise ValueError(
            f"{', '.join(beside)}: peft's file would leave out what is trained whole there"
        )
    named = {}
    for index in sorted(adapters.blocks):
        block = tensors(block_key(index))
        for adapter in adapters.blocks[index]:
            path = f"base_model.model.{module_path(model.family, index, adapter.linear.name)}"
            named[f"{path}.lora_A.weight"] = block[adapter.name_a].contiguous()
            named[f"{path}.lora_B.weight"] = block[adapter.name_b].contiguous()
    for name in adapters.head:
        linear, _, kind = name.rpartition(".")
        named[f"base_model.model.{model.family.head_linears[linear]}.{kind}"] = tensors(HEAD_KEY)[
            name
        ].contiguous()
    for name, value in named.items():
        require_finite(name, value)
    with made_whole(target) as unfinished:
        config = lora_config(model.family, adapters, len(model.plan.blocks), 0.0)
        config.base_model_name_or_path = public_name(model.directory, model.config)
        write_json(unfinished / "adapter_config.json", _as_json(config))
        write_bytes(
            unfinished / "adapter_model.safetensors", save(named, metadata={"format": "pt"})
        )
        write_card(unfinished, card)


def _as_json(config: "LoraConfig") -> dict[str, Any]:
    """Return peft's configuration as JSON values, for inference.

    Sets are sorted, because peft's own files have them in random order.
    """
    config.inference_mode = True
    return {
        key: sorted(value) if isinstance(value, set) else value
        for key, value in sorted(config.to_dict().items())
    }


@torch.no_grad()
def check_adapter(stream: BlockStream, edits: Edits, target: Path, samples: Tensor) -> None:
    """Load the adapter with plain peft on the base model, and compare it with the merged weights.

    Logits are compared, and the updates matrix by matrix, because the updates of a short training
    may be smaller than the tolerance of logits. Merged weights are not rounded to the dtype of the
    model's files here, because this rounding is not an error of the adapter.

    Parameters
    ----------
    stream : the base model
    edits : edits that merge the adapters
    target : directory of the adapter
    samples : (num_sequences, sequence_length), int64, a few sequences of the evaluation text

    Raises
    ------
    ExportError
        peft cannot load the adapter, it adapts other matrices, or updates or logits differ by more
        than rounding explains.
    """
    from transformers import AutoModelForCausalLM

    computing = stream.computing
    base = plain_model(
        AutoModelForCausalLM, stream.model.directory, computing.dtype, computing.device
    )
    try:
        tuned = in_peft(base, target)
    # peft raises errors of many types for files that it cannot load.
    except Exception as error:
        raise ExportError(
            f"{target}: peft cannot load it ({type(error).__name__}); the export is not usable"
        ) from error
    _check_updates(tuned.get_base_model(), stream.model, edits, target)
    found = whole_logits(tuned, samples.to(computing.device))
    require_close(found, logits_of(stream, samples, unrounded(edits)), computing.dtype, target)


def unrounded(edits: Edits) -> Edits:
    """Return the same edits with float32 results."""

    def in_float32(edit: WeightEdit) -> WeightEdit:
        # An edit returns the dtype of its input.
        return lambda weight: edit(weight.to(torch.float32))

    return lambda index: {name: in_float32(edit) for name, edit in edits(index).items()}


@torch.no_grad()
def check_encoder_adapter(
    model: OpenedModel,
    computing: Computing,
    meant: Any,
    target: Path,
    num_classes: int,
) -> None:
    """Load adapter and head with plain peft on the base encoder, and compare the logits.

    Parameters
    ----------
    model : the base encoder
    computing : device of the computation
    meant : encoder with the adapters and the head, on ``computing.device``: see ``edited_encoder``
    target : directory of the adapter
    num_classes : number of classes of the head

    Raises
    ------
    ExportError
        Logits differ by more than rounding explains.
    """
    tuned = encoder_in_peft(model, target, num_classes, computing.device)
    exact = all(parameter.dtype == torch.float32 for parameter in meant.parameters())
    tokens = a_few_tokens(model).to(computing.device)
    found = tuned(input_ids=tokens).logits
    expected = meant(input_ids=tokens).logits
    require_close([found], [expected], torch.float32 if exact else torch.bfloat16, target)


def encoder_in_peft(
    model: OpenedModel, target: Path, num_classes: int, device: torch.device = CPU
) -> Any:
    """Return the base encoder with adapter and head as plain peft loads them.

    The model is float32 and in evaluation mode.
    """
    from transformers import AutoModelForSequenceClassification

    kind = AutoModelForSequenceClassification
    base = plain_model(kind, model.directory, torch.float32, device, num_labels=num_classes)
    return in_peft(base, target)


def edited_encoder(
    model: OpenedModel,
    edits: Edits,
    head: Mapping[str, Tensor],
    num_classes: int,
    device: torch.device = CPU,
) -> Any:
    """Return the encoder that an export should contain, in float32.

    Its edited weights are read module by module.

    Parameters
    ----------
    model : the base encoder
    edits : changes to its weights
    head : tensors of the head by canonical name, such as ``head.dense.weight``, float32
    num_classes : number of classes of the head
    device : device of the computation
    """
    whole = model.new_skeleton(num_classes)
    named = dict[str, Tensor]()
    for name, value in head.items():
        linear, _, kind = name.rpartition(".")
        named[f"{model.family.head_linears[linear]}.{kind}"] = value
    read_when_used(whole, EditedWeights(model, edits, named), device)
    return whole


def in_peft(base: Any, target: Path) -> Any:
    """Return a base model with the adapter as plain peft loads it, in evaluation mode."""
    hush()
    from peft import PeftModel

    # peft 0.21 uses an attribute of transformers 5 that is deprecated; the warning is harmless.
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning
        )
        return PeftModel.from_pretrained(base, str(target)).eval()


def a_few_tokens(model: OpenedModel) -> Tensor:
    """Return two short rows of token ids on which encoders are compared, (2, 8), int64."""
    return torch.arange(4, 20).view(2, 8) % len(model.tokenizer)


def _check_updates(tuned: Any, model: OpenedModel, edits: Edits, target: Path) -> None:
    """Raise ExportError unless every matrix of every block is adapted as it is merged.

    The edit of a matrix of zeros is the update itself.
    """
    for block in model.plan.blocks:
        block_edits = edits(block.index)
        for linear in block.linears:
            module = tuned.get_submodule(module_path(model.family, block.index, linear.name))
            found = (
                module.get_delta_weight(NAME).to("cpu", torch.float32)
                if hasattr(module, "get_delta_weight")
                else None
            )
            edit = block_edits.get(linear.name)
            name = f"{linear.name} of block {block.index}"
            if (found is None) != (edit is None):
                raise ExportError(
                    f"{target}: {name} is adapted in only one of file and result; the export is"
                    " not usable"
                )
            if found is None or edit is None:
                continue
            expected = edit(torch.zeros(linear.shape))
            limit = UPDATE_TOLERANCE * expected.abs().max().item()
            if not (found - expected).abs().max().item() <= limit:
                raise ExportError(
                    f"{target}: the update of {name} is not the one that was trained; the export is"
                    " not usable"
                )
