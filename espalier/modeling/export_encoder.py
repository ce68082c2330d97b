"""Write an encoder whole, with merged adapters and its classification head, and check it against adapter and head in peft."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from espalier.modeling.checkpoint import Checkpoint, ShardWriter
from espalier.modeling.edits import Edits
from espalier.modeling.export import ExportError, bits_of, edited_tensors, made_whole, require_close, write_card
from espalier.modeling.export_adapter import a_few_tokens, encoder_in_peft
from espalier.modeling.model_files import INDEX, copy_beside
from espalier.modeling.opened import OpenedModel
from espalier.storage.atomic import replacing, write_json

WEIGHTS = "model.safetensors"
"""The one file of the weights: what is written lacks the heads of other tasks that the base model's files may hold."""


def export_encoder(
    model: OpenedModel, edits: Edits, head: Mapping[str, Tensor], classes: Sequence[str], target: Path, card: str = ""
) -> None:
    """Write the encoder for sequence classification: edited weights in the dtype of the base model's files, a float32 head.

    The directory appears whole or not at all; weights are read, edited and written one tensor at a time.

    Parameters
    ----------
    head : its tensors by canonical name, float32: ``head.dense.weight`` ...
    classes : names of the classes in the head's order, for ``config.json``
    card : its ``README.md``; an empty one is not written

    Raises
    ------
    Mistake
        The file system refused.
    """
    skeleton = model.new_skeleton(len(classes))
    named = _head_names(model, head)
    specs = {}
    for name, parameter in skeleton.named_parameters():
        if name in named:
            specs[name] = ("F32", tuple(parameter.shape), 4 * parameter.numel())
        elif source := model.stored_name(name):
            stored = model.checkpoint.tensors[source]
            specs[name] = (stored.dtype, stored.shape, stored.stop - stored.start)
    with made_whole(target) as unfinished:
        with replacing(unfinished / WEIGHTS) as file:
            writer = ShardWriter(file, specs, {"format": "pt"})
            for name, value in _tensors(model, specs, edits, named):
                writer.write(name, bits_of(value).numpy().data)
        copy_beside(model.directory, unfinished, (INDEX,))
        config = {key: value for key, value in model.config.items() if key not in ("num_labels", "problem_type")}
        config["architectures"] = [type(skeleton).__name__]
        config["id2label"] = {str(place): name for place, name in enumerate(classes)}
        config["label2id"] = {name: place for place, name in enumerate(classes)}
        write_json(unfinished / "config.json", config)
        write_card(unfinished, card)


def _head_names(model: OpenedModel, head: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The head's tensors under the names that transformers gives them."""
    parts = {name: name.rpartition(".") for name in head}
    return {f"{model.family.head_linears[linear]}.{kind}": head[name] for name, (linear, _, kind) in parts.items()}


def _tensors(
    model: OpenedModel, names: Mapping[str, object], edits: Edits, named_head: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor as it is to be written, one at a time, in the order of ``names``."""
    sources = {name: model.stored_name(name) for name in names if name not in named_head}
    stored = edited_tensors(model, [source for source in sources.values() if source], edits)
    for name in names:
        yield name, named_head[name] if name in named_head else next(stored)[1]


@torch.no_grad()
def check_encoder(
    model: OpenedModel, edits: Edits, head: Mapping[str, Tensor], num_classes: int, target: Path, adapter: Path
) -> None:
    """Reload the encoder by plain ``from_pretrained``, and compare its logits with those of the adapter in plain peft.

    Parameters
    ----------
    target : the encoder that was written
    adapter : the adapter of the same run

    Raises
    ------
    ExportError
        Logits differ by more than the files' dtype explains, or a tensor is not, bit for bit, what was to be written.
    """
    from transformers import AutoModelForSequenceClassification

    reloaded = AutoModelForSequenceClassification.from_pretrained(target, local_files_only=True, dtype=torch.float32).eval()
    tokens = a_few_tokens(model)
    found, expected = reloaded(input_ids=tokens).logits, encoder_in_peft(model, adapter, num_classes)(input_ids=tokens).logits
    if found.shape != expected.shape:
        raise ExportError(f"{target}: the reloaded model has another number of classes; the export is not usable")
    stored = {linear.dtype for block in model.plan.blocks for linear in block.linears}
    require_close([found], [expected], torch.float32 if stored == {"F32"} else torch.bfloat16, target)
    written = Checkpoint(target)
    for name, value in _tensors(model, written.tensors, edits, _head_names(model, head)):
        if not torch.equal(bits_of(written.read(name)), bits_of(value)):
            raise ExportError(f"{target}: {name} is not what was to be exported; the export is not usable")
