"""Export of an encoder, whole or pruned, with merged adapters and a classification head."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from espalier.hf.export.adapter import a_few_tokens, edited_encoder, encoder_weights
from espalier.hf.export.model import (
    ExportError,
    reloaded,
    replacing_folder,
    require_close,
    require_written,
    write_card,
)
from espalier.hf.files.checkpoint import INDEX, SINGLE, Checkpoint, write_shard
from espalier.hf.opening.model_files import copy_other_files
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.stream.edits import Edits
from espalier.hf.structured.export import architecture_of, best_form, config_of, write_other_files
from espalier.messages.tensor_blobs import TensorSpec
from espalier.storage.atomic import write_json

REPLACED_BY_CLASSES = ("num_labels", "problem_type")
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
    ``compact``, which includes the code that builds the model. Raises InputError if writing failed.

    Parameters
    ----------
    model : the base encoder, or what a structure keeps of it
    edits : changes to its weights
    head : tensors of the head by canonical name, such as ``head.dense.weight``, float32
    classes : names of the classes in the head's order, for ``config.json``
    target : directory to write
    card : content of ``README.md``; an empty string writes none
    """
    skeleton = model.new_skeleton(len(classes))
    name = type(skeleton).__name__
    heads = {model.family.parameter_path(own, None) for own in head}
    with replacing_folder(target) as unfinished:
        specs = dict[str, TensorSpec]()
        for path, parameter in skeleton.named_parameters():
            if source := model.stored_name(path):
                specs[path] = model.checkpoint.tensors[source]
            # The head is trained in float32, whatever the files have.
            if path in heads:
                specs[path] = TensorSpec("F32", tuple(parameter.shape))
        weight = encoder_weights(model, edits, head)
        write_shard(unfinished / SINGLE, specs, ((path, weight(path)) for path in specs))
        # A whole encoder keeps its files; a pruned one needs another configuration.
        if model.cut is None:
            copy_other_files(model.directory, unfinished, (INDEX,))
            write_json(unfinished / "config.json", _labelled(model.config, name, classes))
        else:
            form = best_form(model)
            config = config_of(model, form)
            config = _labelled(config, architecture_of(name, config), classes)
            write_other_files(model, unfinished, form, config)
        write_card(unfinished, card)


def _labelled(
    config: Mapping[str, Any], architecture: str, classes: Sequence[str]
) -> dict[str, Any]:
    """Return ``config.json`` of an encoder with a head.

    It names the model class and the classes of the task in the head's order.
    """
    # Of these the base's values concern another task.
    return {key: value for key, value in config.items() if key not in REPLACED_BY_CLASSES} | {
        "architectures": [architecture],
        "id2label": {str(place): name for place, name in enumerate(classes)},
        "label2id": {name: place for place, name in enumerate(classes)},
    }


@torch.no_grad()
def check_encoder(
    model: OpenedModel, edits: Edits, head: Mapping[str, Tensor], target: Path
) -> None:
    """Reload an exported encoder and compare its logits and tensors with the intended ones.

    Raises ExportError if logits differ by more than rounding in the dtype of the files explains, or
    a tensor is not the intended one bit for bit.

    Parameters
    ----------
    model : the base encoder, or what a structure keeps of it
    edits : changes to its weights
    head : tensors of the head by canonical name, float32
    target : directory of the export
    """
    cpu = torch.device("cpu")
    tokens = a_few_tokens(model)
    logits = reloaded(target, torch.float32, cpu)(input_ids=tokens).logits
    expected = edited_encoder(model, edits, head, cpu)(input_ids=tokens).logits
    if logits.shape != expected.shape:
        raise ExportError(
            f"{target}: the reloaded model has another number of classes; the export is not usable"
        )
    stored = {linear.dtype for linear in model.plan.linears}
    require_close(
        [logits], [expected], torch.float32 if stored == {"F32"} else torch.bfloat16, target
    )
    weight = encoder_weights(model, edits, head)
    require_written(target, ((name, weight(name)) for name in Checkpoint(target).tensors))
