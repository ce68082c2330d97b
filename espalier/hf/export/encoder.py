"""Export of an encoder, whole or pruned, with merged adapters and a classification head.

The result is checked against adapter and head in peft, or against a model in memory.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from espalier.hf.export.adapter import CPU, a_few_tokens, encoder_in_peft
from espalier.hf.export.model import (
    ExportError,
    bits_of,
    edited_tensors,
    made_whole,
    reloaded_model,
    require_close,
    write_card,
)
from espalier.hf.files.checkpoint import INDEX, Checkpoint, ShardWriter
from espalier.hf.opening.model_files import copy_beside
from espalier.hf.opening.opened import OpenedModel
from espalier.hf.stream.edits import Edits
from espalier.hf.structured.configuration import STRUCTURED_CLASS
from espalier.hf.structured.export import best_form, config_of, write_beside
from espalier.storage.atomic import replacing, write_json

WEIGHTS = "model.safetensors"
"""Name of the single weight file.

It does not contain heads of other tasks, which the files of the base model may hold.
"""

SAID_BY_CLASSES = ("num_labels", "problem_type")
"""Keys of ``config.json`` that the names of the classes replace."""


def export_encoder(
    model: OpenedModel,
    edits: Edits,
    head: Mapping[str, Tensor],
    classes: Sequence[str],
    target: Path,
    card: str = "",
) -> None:
    """Write an encoder for sequence classification.

    Edited weights have the dtype of the base model's files; the head is float32. The directory is
    written atomically: it appears complete or not at all. Weights are read, edited and written one
    tensor at a time. A pruned encoder has the form ``plain`` if all blocks are alike, otherwise
    ``compact``, which includes the code that builds the model.

    Parameters
    ----------
    model : the base encoder, or what a structure keeps of it
    edits : changes to its weights
    head : tensors of the head by canonical name, such as ``head.dense.weight``, float32
    classes : names of the classes in the head's order, for ``config.json``
    target : directory to write
    card : content of ``README.md``; an empty string writes none

    Raises
    ------
    InputError
        Writing failed.
    """
    skeleton = model.new_skeleton(len(classes))
    name = type(skeleton).__name__
    with made_whole(target) as unfinished:
        _write_weights(model, skeleton, edits, head, unfinished)
        if model.cut is None:
            copy_beside(model.directory, unfinished, (INDEX,))
            write_json(unfinished / "config.json", _labelled(model.config, name, classes))
        else:
            form = best_form(model)
            name = name.removeprefix(STRUCTURED_CLASS) if form == "plain" else name
            config = _labelled(config_of(model, form), name, classes)
            write_beside(model, unfinished, form, config)
        write_card(unfinished, card)


def _write_weights(
    model: OpenedModel, skeleton: nn.Module, edits: Edits, head: Mapping[str, Tensor], folder: Path
) -> None:
    """Write the weights of an encoder for sequence classification, one tensor at a time.

    Tensors have the names of the model class ``skeleton``.
    """
    named = _head_names(model, head)
    specs = dict[str, tuple[str, tuple[int, ...], int]]()
    for name, parameter in skeleton.named_parameters():
        if name in named:
            specs[name] = ("F32", tuple(parameter.shape), 4 * parameter.numel())
        elif source := model.stored_name(name):
            stored = model.checkpoint.tensors[source]
            specs[name] = (stored.dtype, stored.shape, stored.stop - stored.start)
    with replacing(folder / WEIGHTS) as file:
        writer = ShardWriter(file, specs, {"format": "pt"})
        for name, value in _tensors(model, specs, edits, named):
            writer.write(name, bits_of(value).numpy().data)


def _labelled(
    config: Mapping[str, Any], architecture: str, classes: Sequence[str]
) -> dict[str, Any]:
    """Return ``config.json`` of an encoder with a head.

    It names the model class and the classes of the task in the head's order.
    """
    return {key: value for key, value in config.items() if key not in SAID_BY_CLASSES} | {
        "architectures": [architecture],
        "id2label": {str(place): name for place, name in enumerate(classes)},
        "label2id": {name: place for place, name in enumerate(classes)},
    }


def _head_names(model: OpenedModel, head: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of the head by transformers' names."""
    parts = {name: name.rpartition(".") for name in head}
    return {
        f"{model.family.head_linears[linear]}.{kind}": head[name]
        for name, (linear, _, kind) in parts.items()
    }


def _tensors(
    model: OpenedModel, names: Mapping[str, object], edits: Edits, named_head: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor as it is written, one at a time, in the order of ``names``."""
    sources = {name: model.stored_name(name) for name in names if name not in named_head}
    stored = edited_tensors(model, [source for source in sources.values() if source], edits)
    for name in names:
        yield name, named_head[name] if name in named_head else next(stored)[1]


def check_encoder(
    model: OpenedModel,
    edits: Edits,
    head: Mapping[str, Tensor],
    num_classes: int,
    target: Path,
    adapter: Path,
) -> None:
    """Reload an exported encoder and compare it with the adapter in plain peft.

    Parameters
    ----------
    model : the base encoder
    edits : changes to its weights
    head : tensors of the head by canonical name, float32
    num_classes : number of classes of the head
    target : directory of the exported encoder
    adapter : directory of the adapter of the same run

    Raises
    ------
    ExportError
        Logits differ by more than rounding in the dtype of the files explains, or a tensor is not
        the intended one bit for bit.
    """
    meant = encoder_in_peft(model, adapter, num_classes)
    check_against(model, edits, head, meant, target)


@torch.no_grad()
def check_against(
    model: OpenedModel,
    edits: Edits,
    head: Mapping[str, Tensor],
    meant: Any,
    target: Path,
) -> None:
    """Compare an exported encoder with ``meant``, an encoder in memory.

    ``meant`` is float32 on the CPU and has the adapters and the head. Other parameters and errors
    are those of ``check_encoder``.
    """
    from transformers import AutoModelForSequenceClassification

    reloaded = reloaded_model(AutoModelForSequenceClassification, target, torch.float32, CPU)
    tokens = a_few_tokens(model)
    found = reloaded(input_ids=tokens).logits
    expected = meant(input_ids=tokens).logits
    if found.shape != expected.shape:
        raise ExportError(
            f"{target}: the reloaded model has another number of classes; the export is not usable"
        )
    stored = {linear.dtype for block in model.plan.blocks for linear in block.linears}
    require_close(
        [found], [expected], torch.float32 if stored == {"F32"} else torch.bfloat16, target
    )
    written = Checkpoint(target)
    for name, value in _tensors(model, written.tensors, edits, _head_names(model, head)):
        if not torch.equal(bits_of(written.read(name)), bits_of(value)):
            raise ExportError(
                f"{target}: {name} is not the value to export; the export is not usable"
            )
