"""Export of a sliced model: its configuration, its tensors and the code that builds it.

The code is a copy of ``modeling_sliced.py``. transformers runs it with ``trust_remote_code=True``.
If Espalier is installed, it is enough to import that module.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from espalier.errors import InputError
from espalier.hf.export.model import edited_tensors, replacing_folder, write_card, write_shards
from espalier.hf.families import SLICED, Family
from espalier.hf.files.checkpoint import INDEX
from espalier.hf.files.tensor_names import missing_tensor
from espalier.hf.opening.model_files import copy_other_files
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.sliced import modeling_sliced
from espalier.hf.stream.edits import dense
from espalier.hf.structured.export import specs_of
from espalier.methods.pruning.slicegpt import dense_width
from espalier.models.plan import ModelPlan
from espalier.storage.atomic import write_json

CODE = Path(modeling_sliced.__file__)
"""Module that is copied into an export."""


def export_sliced(model: OpenedModel, target: Path, card: str = "") -> None:
    """Write a sliced model in the dtypes of the base's files, one tensor at a time.

    The directory appears complete or, with ``InputError``, not at all.
    """
    with replacing_folder(target) as unfinished:
        specs = specs_of(model)
        write_shards(specs, edited_tensors(model, specs, dense, "writing"), unfinished)
        # The configuration is another one, so it is not copied.
        copy_other_files(model.directory, unfinished, (INDEX, "config.json", CODE.name))
        write_json(unfinished / "config.json", model.config)
        shutil.copyfile(CODE, unfinished / CODE.name)
        write_card(unfinished, card)


SLICEABLE: dict[str, Any] = {
    cls.config_class.model_type.removeprefix(SLICED): cls for cls in modeling_sliced.CLASSES
}
"""Class of the sliced model by ``model_type`` of a base that can be sliced.

Such a base has an RMS norm before attention and one before the feed-forward part.
"""


def require_sliceable(model: OpenedModel) -> None:
    """Raise ``InputError`` for a model type that cannot be rotated, or a missing outer tensor."""
    model_type = model.config["model_type"]
    if model_type not in SLICEABLE:
        raise InputError(
            f"{model.directory / 'config.json'}: model_type = {model_type!r}: the residual stream"
            " can be rotated where only RMS norms read it, in models of the types"
            f" {', '.join(SLICEABLE)} as they were trained; name one of them"
        )
    family = model.family
    # Tensors outside the blocks that are rotated too.
    outer = [family.embeddings, family.final_norm, *([] if is_tied(model) else [family.head])]
    for name in (f"{path}.weight" for path in outer):
        if name not in model.checkpoint.tensors:
            raise missing_tensor(model, name)


def is_tied(model: OpenedModel) -> bool:
    """Return whether the head of a model is tied to its embedding."""
    return bool(model.configured("tie_word_embeddings"))


def sliced_config(
    base: Mapping[str, Any], family: Family, plan: ModelPlan, width: int
) -> dict[str, Any]:
    """Return the configuration of a model whose residual stream is sliced to ``width``.

    ``base`` is ``config.json`` of the dense model, and ``plan`` its plan.
    """
    cls = SLICEABLE[base["model_type"]]
    return dict(base) | {
        "model_type": cls.config_class.model_type,
        "hidden_size": width,
        "dense_hidden_size": dense_width(plan),
        # transformers would derive another width from the smaller hidden size.
        "head_dim": plan.head_dim,
        # Embedding and head have different bases, so they cannot be tied.
        "tie_word_embeddings": False,
        "architectures": [cls.__name__],
        "auto_map": {
            "AutoConfig": f"{CODE.stem}.{cls.config_class.__name__}",
            family.auto_class: f"{CODE.stem}.{cls.__name__}",
        },
    }
