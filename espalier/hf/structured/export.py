"""Export of a pruned model in a form that others can read, and a check that reloads it.

- ``compact``: the kept parts of the tensors, ``structure.json``, and, unless blocks are alike, the
  code that builds blocks of different widths (``modeling_structured.py``). transformers runs the
  code with ``trust_remote_code=True``. If transformers has keys for everything in the model,
  ``config.json`` has only these (``uneven_config``), and releases whose layers read them need no
  remote code.
- ``plain``: the same parts, for transformers without additional code. All blocks must be alike:
  blocks were dropped, or all have the same widths.
- ``zero-filled``: the base's shapes with zeros for everything that was cut, for transformers
  without additional code. The model is not smaller or faster.
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from espalier.errors import InputError
from espalier.hf.export.model import (
    check_export,
    check_logits,
    replacing_folder,
    require_written,
    shard_by_shard,
    weight_reader,
    write_card,
    write_shards,
)
from espalier.hf.families import STRUCTURED
from espalier.hf.files.checkpoint import INDEX, StoredTensor
from espalier.hf.files.dtypes import TORCH_DTYPES
from espalier.hf.opening.model_files import copy_other_files
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.stream.block_stream import BlockStream
from espalier.hf.stream.edits import Edits, dense
from espalier.hf.structured import modeling_structured
from espalier.hf.structured.configuration import (
    BIASED,
    STRUCTURE_FILE,
    STRUCTURED_CLASS,
    UNEVEN_CLASS,
    bias_key,
    plain_config,
    uneven_config,
)
from espalier.hf.structured.cut_checkpoint import CutCheckpoint
from espalier.hf.structured.selection import lowest
from espalier.models.groups import Groups
from espalier.models.structure import Structure
from espalier.progress import report_each
from espalier.settings.pruning import StructuredSettings
from espalier.storage.atomic import write_json

Form = Literal["compact", "plain", "zero-filled"]
FORMS = get_args(Form)

CODE = Path(modeling_structured.__file__)
"""Module that is copied into a compact export."""
REWRITTEN = (INDEX, "config.json", STRUCTURE_FILE, CODE.name)
"""Files of the base that are not copied: an export writes its own or needs none."""


def possible_forms(model: OpenedModel) -> dict[Form, str]:
    """Return the forms in which a pruned model cannot be written, with the reason."""
    structure = model.structure
    refused = dict[Form, str]()
    assert structure is not None
    # A base that is a pruned model itself has no dense shapes to fill.
    if OpenedModel(model.directory).structure is not None:
        refused["zero-filled"] = (
            f"{model.directory} holds a smaller model itself, and what was cut from it is not there"
        )
    if plain_config(model.config, model.family, model.plan, structure) is None:
        refused["plain"] = "its blocks are not alike, or transformers has no keys for their shape"
    if missing := [name for name in structure.added_biases if bias_key(model.family, name) is None]:
        refused["zero-filled"] = (
            f"transformers' {model.family.name} has no bias at {' and '.join(missing)}"
        )
    # A block whose linears are zero returns its input unless a norm acts on the residual stream.
    norms_first = (
        model.family.kind == "decoder" and model.config.get("do_layer_norm_before", True) is True
    )
    if len(structure.blocks) < len(structure.base) and not norms_first:
        refused["zero-filled"] = (
            "a norm stands behind each block, so that one of zeros is not as if it were not there"
        )
    return refused


def best_form(model: OpenedModel) -> Form:
    """Return ``plain`` if possible, otherwise ``compact``."""
    return "compact" if "plain" in possible_forms(model) else "plain"


def require_writable(
    model: OpenedModel, job: StructuredSettings, biases: Sequence[str], blocks: range
) -> None:
    """Refuse a pruning ratio that cannot be reached, or a form that cannot be written.

    ``biases`` are the canonical names of the matrices that get a bias, and ``blocks`` those that
    may be pruned.

    Raises
    ------
    InputError
        The message begins with the key in the method's table.
    """
    groups = Groups.of(model.plan, blocks)
    # Scores of zero give a structure with the shape constraints of the real one.
    any_scores = torch.zeros(len(groups.costs), dtype=torch.float64)
    like_it = groups.structure(lowest(groups, any_scores, job, groups.reachable(job)), biases)
    # Whether blocks become alike depends on scores that do not exist yet.
    if job.form == "plain" and job.selection != "kind":
        raise InputError(
            "pruning.form = 'plain': the blocks may get different widths; set pruning.selection to"
            " 'kind', with which they stay alike, or pruning.form to 'auto'"
        )
    require_form(OpenedModel(model.directory, like_it), job.form)


def require_form(model: OpenedModel, form: str) -> None:
    """Raise ``InputError``, with the key ``form``, if a pruned model cannot be written so."""
    refused = {str(name): reason for name, reason in possible_forms(model).items()}
    if form in refused:
        allowed = " or ".join(repr(name) for name in ("auto", *FORMS) if name not in refused)
        raise InputError(f"pruning.form = '{form}': {refused[form]}; choose {allowed}")


def export_structured(
    model: OpenedModel, edits: Edits, target: Path, form: Form, card: str = ""
) -> None:
    """Write a pruned model with edited weights, in the dtypes of the base's files.

    The directory ``target`` is written atomically: it appears complete or not at all. Tensors are
    read, cut, edited and written one at a time. ``card`` is the content of ``README.md``; an empty
    string writes none. Raises InputError if the model cannot be written in this form, or writing
    failed.
    """
    # Fail before anything is written.
    require_form(model, form)
    with replacing_folder(target) as unfinished:
        if form == "zero-filled":
            write_shards(_filled_specs(model), _filled(model, edits), unfinished)
        else:
            write_shards(specs_of(model), _cut(model, edits), unfinished)
        write_other_files(model, unfinished, form, config_of(model, form))
        write_card(unfinished, card)


def write_other_files(
    model: OpenedModel, folder: Path, form: Form, config: Mapping[str, Any]
) -> None:
    """Write the files of a pruned model other than its weights.

    These are configuration, tokenizer and licence, and with ``compact`` the structure and the code,
    if the configuration names it.
    """
    copy_other_files(model.directory, folder, REWRITTEN)
    write_json(folder / "config.json", dict(config))
    if form == "compact":
        assert model.structure is not None
        write_json(folder / STRUCTURE_FILE, model.structure.to_json())
    if form == "compact" and "auto_map" in config:
        shutil.copyfile(CODE, folder / CODE.name)


@torch.no_grad()
def check_structured(stream: BlockStream, target: Path, samples: Tensor, form: Form) -> None:
    """Reload an exported pruned model and compare its logits and tensors with the intended ones.

    ``samples``, (num_sequences, sequence_length), int64, are a few sequences of text. Raises
    ExportError if logits differ by more than rounding in the compute dtype explains, or a tensor
    differs.
    """
    if form != "zero-filled":
        check_export(stream, dense, target, samples)
        return
    # Shapes differ from the pruned model's, so only logits can be compared with it.
    check_logits(stream, dense, target, samples)
    require_written(target, _filled(stream.model, dense))


def config_of(model: OpenedModel, form: Form) -> dict[str, Any]:
    """Return ``config.json`` of a pruned model in the given form."""
    structure = model.structure
    assert structure is not None
    # The base's configuration, with the keys of added biases.
    if form == "zero-filled":
        base = OpenedModel(model.directory)
        return base.config | {
            key: True for name in structure.added_biases if (key := bias_key(model.family, name))
        }
    # Keys of the family whenever they are enough.
    described = (model.config, model.family, model.plan, structure)
    if (plain := plain_config(*described)) is not None:
        return plain
    assert form == "compact"
    config = uneven_config(*described) or model.config
    cls = modeling_structured.CLASSES[config["model_type"]]
    auto = {
        "AutoConfig": f"{CODE.stem}.{cls.config_class.__name__}",
        model.family.auto_class: f"{CODE.stem}.{cls.__name__}",
    }
    return config | {"architectures": [architecture_of(cls.__name__, config)], "auto_map": auto}


def architecture_of(name: str, config: Mapping[str, Any]) -> str:
    """Return the class name of a pruned model for ``architectures`` of its configuration.

    ``name`` is that of Espalier's class. It is that of the family if transformers has keys for
    everything in the model.
    """
    if str(config["model_type"]).startswith(STRUCTURED):
        return name
    return name.removeprefix(STRUCTURED_CLASS).removeprefix(UNEVEN_CLASS)


def specs_of(model: OpenedModel) -> dict[str, StoredTensor]:
    """Return the tensors of a pruned model's files, in the order of the base's shards."""
    return shard_by_shard(model.checkpoint, model.checkpoint.tensors | zero_biases(model))


def zero_biases(model: OpenedModel) -> dict[str, StoredTensor]:
    """Return biases of zeros that a configuration key adds along with those of a pruned model."""
    structure = model.structure
    if structure is None or (
        uneven_config(model.config, model.family, model.plan, structure) is None
    ):
        return {}
    return _biases_by_keys(structure, model)


def _biases_by_keys(structure: Structure, model: OpenedModel) -> dict[str, StoredTensor]:
    """Return biases that ``model`` lacks and the keys for the added ones of a structure add.

    For example, ``attention_bias`` of LLaMA adds a bias to four matrices, of which pruning with
    compensation needs one.
    """
    keys = {key for name in structure.added_biases if (key := bias_key(model.family, name))}
    biases = {}
    for linear in model.plan.linears:
        if not linear.bias and any(linear.name in BIASED[key] for key in keys):
            weight = model.checkpoint.tensors[linear.parameter]
            biases[linear.bias_parameter] = StoredTensor(
                weight.dtype, weight.shape[:1], weight.shard
            )
    return biases


def _cut(model: OpenedModel, edits: Edits) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of ``specs_of``."""
    zeros = zero_biases(model)
    read = weight_reader(model, edits)
    for name in report_each(list(specs_of(model)), "writing tensor"):
        if name in zeros:
            yield name, torch.zeros(zeros[name].shape, dtype=TORCH_DTYPES[zeros[name].dtype])
        else:
            yield name, read(name)


# ----- zeros for everything that was cut -----


def _filled_specs(model: OpenedModel) -> dict[str, StoredTensor]:
    """Return the tensors of the base, and biases that a configuration key adds."""
    assert model.structure is not None
    base = OpenedModel(model.directory)
    biases = _biases_by_keys(model.structure, base)
    return shard_by_shard(base.checkpoint, base.checkpoint.tensors | biases)


def _filled(model: OpenedModel, edits: Edits) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors in the base's shapes, with zeros for everything that was cut."""
    cut = model.checkpoint
    base = OpenedModel(model.directory).checkpoint
    cut_names = dict[str, str]()
    if isinstance(cut, CutCheckpoint) and model.cut is not None:
        # The pruned model renumbers its blocks, so names are mapped back to the base.
        cut_names = {part.source: name for name, part in cut.parts.items()}
        for name in cut.given.keys() - cut.parts.keys():
            if block := model.family.block_of(name):
                source = model.cut.blocks[block[1]].source
                cut_names[f"{block[0]}{source}.{block[2]}"] = name
    read = weight_reader(model, edits)
    for name, stored in _filled_specs(model).items():
        if (cut_name := cut_names.get(name)) is not None:
            yield name, _spread(model, cut_name, read(cut_name), stored.shape)
        elif name in base.tensors and not (
            (block := model.family.block_of(name))
            and block[2].rpartition(".")[0] in model.family.linears.values()
        ):
            # Norms of a dropped block stay: its linears of zeros hide them.
            yield name, base.read(name)
        else:
            yield name, torch.zeros(stored.shape, dtype=TORCH_DTYPES[stored.dtype])


def _spread(model: OpenedModel, name: str, value: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a part in the base's shape, with zeros elsewhere."""
    cut = model.checkpoint
    assert isinstance(cut, CutCheckpoint)
    part = cut.parts.get(name) or cut.parts.get(name.removesuffix("bias") + "weight")
    assert part is not None
    # Rows first, then columns.
    for side, kept in enumerate((part.rows, part.columns)[: value.dim()]):
        if kept is not None:
            padded = value.new_zeros(*value.shape[:side], shape[side], *value.shape[side + 1 :])
            value = padded.index_copy_(side, torch.tensor(kept), value)
    return value
