"""Export of adapters in peft's format, and a check that plain peft loads them on the base model."""

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from espalier.hf.export.model import (
    ExportError,
    logits_of,
    reloaded,
    replacing_folder,
    require_close,
    require_finite,
    weight_reader,
    whole_logits,
    write_card,
)
from espalier.hf.machine.computing import Computing
from espalier.hf.nf4.matrices import silence_bitsandbytes
from espalier.hf.opening.disk_model import Weights, read_when_used
from espalier.hf.opening.model_files import commit_of, loadable_name
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.stream.block_stream import BlockStream
from espalier.hf.stream.edits import Edits, WeightEdit
from espalier.hf.whole.adapters import NAME, lora_config
from espalier.models.adapters import HEAD_KEY, AdapterPlan
from espalier.models.plan import block_key
from espalier.storage.atomic import write_bytes, write_json

BlobTensors = Callable[[str], Mapping[str, Tensor]]
"""Function from a blob key to its tensors: float32, by canonical name."""

UPDATE_TOLERANCE = 1e-4
"""Allowed difference of an update, relative to its largest value.

Two float32 products of the same factors differ by rounding.
"""


def export_adapter(
    model: OpenedModel, adapters: AdapterPlan, tensors: BlobTensors, target: Path, card: str = ""
) -> None:
    """Write ``adapter_config.json``, ``adapter_model.safetensors`` and the card.

    The directory is written atomically: it appears complete or not at all. The configuration names
    the base model by its name and commit on the hub, or by its absolute path, so that
    ``AutoPeftModelForCausalLM.from_pretrained(adapter)`` finds it from any working directory. The
    same adapters of the same base at the same place give the same bytes.

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
    # peft has no place for other tensors that are trained whole.
    if others := sorted(set(adapters.whole) - {HEAD_KEY}):
        raise ValueError(
            f"{', '.join(others)}: peft cannot store the modules that are trained as a whole there"
        )
    named = {}
    for index in sorted(adapters.blocks):
        block = tensors(block_key(index))
        for adapter in adapters.blocks[index]:
            # Names as peft gives them: its wrapper adds two levels.
            path = f"base_model.model.{model.family.module_path(index, adapter.linear.name)}"
            named[f"{path}.lora_A.weight"] = block[adapter.name_a].contiguous()
            named[f"{path}.lora_B.weight"] = block[adapter.name_b].contiguous()
    for name in adapters.head:
        path = f"base_model.model.{model.family.parameter_path(name, None)}"
        named[path] = tensors(HEAD_KEY)[name].contiguous()
    # A damaged adapter must not be written.
    for name, value in named.items():
        require_finite(name, value)
    with replacing_folder(target) as unfinished:
        config = lora_config(model.family, adapters, len(model.plan.blocks), 0.0)
        config.base_model_name_or_path = loadable_name(model.directory, model.config)
        config.revision = commit_of(model.directory)
        # As peft sets it for an adapter that is loaded for use.
        config.inference_mode = True
        # Sets are sorted, because peft's own files have them in random order.
        document = {
            key: sorted(value) if isinstance(value, set) else value
            for key, value in sorted(config.to_dict().items())
        }
        write_json(unfinished / "adapter_config.json", document)
        write_bytes(
            unfinished / "adapter_model.safetensors", save(named, metadata={"format": "pt"})
        )
        write_card(unfinished, card)


@torch.no_grad()
def check_adapter(stream: BlockStream, edits: Edits, target: Path, samples: Tensor) -> None:
    """Load the adapter with plain peft on the base model, and compare it with the merged weights.

    Logits are compared, and the updates matrix by matrix, because the updates of a short training
    may be smaller than the tolerance of logits. Merged weights are not rounded to the dtype of the
    model's files here, because this rounding is not an error of the adapter. Raises ExportError if
    peft cannot load the adapter, it adapts other matrices, or updates or logits differ by more than
    rounding explains.

    Parameters
    ----------
    stream : the base model
    edits : edits that merge the adapters
    target : directory of the adapter
    samples : (num_sequences, sequence_length), int64, a few sequences of the evaluation text
    """
    computing = stream.computing
    base = reloaded(stream.model.directory, computing.dtype, computing.device)
    try:
        tuned = in_peft(base, target)
    # peft raises errors of many types for files that it cannot load.
    except Exception as error:
        raise ExportError(
            f"{target}: peft cannot load it ({type(error).__name__}); the export is not usable"
        ) from error
    # Matrix by matrix first: an update may be too small to show in logits.
    _check_updates(tuned.get_base_model(), stream.model, edits, target)
    logits = whole_logits(tuned, samples.to(computing.device))
    require_close(logits, logits_of(stream, samples, unrounded(edits)), computing.dtype, target)


def unrounded(edits: Edits) -> Edits:
    """Return the same edits with float32 results."""

    def in_float32(edit: WeightEdit) -> WeightEdit:
        # An edit returns the dtype of its input.
        return lambda weight: edit(weight.to(torch.float32))

    return lambda index: {name: in_float32(edit) for name, edit in edits(index).items()}


@torch.no_grad()
def check_encoder_adapter(
    model: OpenedModel, computing: Computing, edits: Edits, head: Mapping[str, Tensor], target: Path
) -> None:
    """Load adapter and head with plain peft on the base encoder, and compare the logits.

    Both models are float32. Raises ExportError if logits differ by more than rounding explains.

    Parameters
    ----------
    model : the base encoder
    computing : device of the computation
    edits : edits that merge the adapters
    head : tensors of the head by canonical name, such as ``head.dense.weight``, float32
    target : directory of the adapter
    """
    device = computing.device
    intended = edited_encoder(model, edits, head, device)
    base = reloaded(model.directory, torch.float32, device, num_classes(head))
    tokens = a_few_tokens(model).to(device)
    logits = in_peft(base, target)(input_ids=tokens).logits
    require_close([logits], [intended(input_ids=tokens).logits], torch.float32, target)


def num_classes(head: Mapping[str, Tensor]) -> int:
    """Return the number of classes of a classification head."""
    return head["head.out.weight"].shape[0]


def edited_encoder(
    model: OpenedModel, edits: Edits, head: Mapping[str, Tensor], device: torch.device
) -> Any:
    """Return the encoder that an export should contain, in float32 without rounding.

    Its edited weights are read module by module.
    """
    whole = model.new_skeleton(num_classes(head))
    read_when_used(whole, encoder_weights(model, unrounded(edits), head), device)
    return whole


def encoder_weights(model: OpenedModel, edits: Edits, head: Mapping[str, Tensor]) -> Weights:
    """Return a function that reads one edited weight of an encoder, or one of its head.

    Parameters
    ----------
    model : the base encoder
    edits : changes to its weights
    head : tensors of the head by canonical name, float32
    """
    named = {model.family.parameter_path(name, None): value for name, value in head.items()}
    read = weight_reader(model, edits)

    def weight(name: str) -> Tensor:
        if name in named:
            return named[name]
        # Weights that no file holds, such as a new head, are in ``named``.
        stored = model.stored_name(name)
        if stored is None:
            raise KeyError(name)
        return read(stored)

    return weight


def in_peft(base: Any, target: Path) -> Any:
    """Return a base model with the adapter as plain peft loads it, in evaluation mode."""
    silence_bitsandbytes()
    from peft import PeftModel

    # peft 0.21 uses an attribute of transformers 5 that is deprecated; the warning is harmless.
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning
        )
        return PeftModel.from_pretrained(base, str(target)).eval()


def a_few_tokens(model: OpenedModel) -> Tensor:
    """Return two short rows of token ids on which encoders are compared, (2, 8), int64."""
    # Without special tokens, which the first ids mostly are.
    return torch.arange(4, 20).view(2, 8) % len(model.tokenizer)


def _check_updates(tuned: Any, model: OpenedModel, edits: Edits, target: Path) -> None:
    """Raise ExportError unless every matrix of every block is adapted as it is merged.

    The edit of a matrix of zeros is the update itself.
    """
    for block in model.plan.blocks:
        block_edits = edits(block.index)
        for linear in block.linears:
            module = tuned.get_submodule(model.family.module_path(block.index, linear.name))
            update = (
                module.get_delta_weight(NAME).to("cpu", torch.float32)
                if hasattr(module, "get_delta_weight")
                else None
            )
            edit = block_edits.get(linear.name)
            name = f"{linear.name} of block {block.index}"
            if (update is None) != (edit is None):
                raise ExportError(
                    f"{target}: {name} is adapted in only one of file and result; the export is"
                    " not usable"
                )
            if update is None or edit is None:
                continue
            # The edit adds the update, so with zeros it is the update.
            expected = edit(torch.zeros(linear.shape))
            limit = UPDATE_TOLERANCE * expected.abs().max().item()
            # "not <=" refuses NaN too.
            if not (update - expected).abs().max().item() <= limit:
                raise ExportError(
                    f"{target}: the update of {name} is not the one that was trained; the export is"
                    " not usable"
                )
