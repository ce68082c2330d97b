"""Export of a sliced model: its tensors and the code that builds it.

The code is a copy of ``modeling_sliced.py``. transformers runs it with ``trust_remote_code=True``.
If Espalier is installed, it is enough to import that module.
"""

import shutil
from pathlib import Path

from espalier.hf.export.model import edited_tensors, made_whole, write_card
from espalier.hf.files.checkpoint import INDEX
from espalier.hf.opening.model_files import copy_beside
from espalier.hf.opening.opened import OpenedModel
from espalier.hf.sliced import modeling_sliced
from espalier.hf.stream.edits import dense
from espalier.hf.structured.export import specs_of, write_shards
from espalier.storage.atomic import write_json

CODE = Path(modeling_sliced.__file__)
"""Module that is copied into an export."""


def export_sliced(model: OpenedModel, target: Path, card: str = "") -> None:
    """Write a sliced model in the dtypes of the base's files.

    The directory is written atomically: it appears complete or not at all. Tensors are read,
    rotated and written one at a time.

    Raises
    ------
    InputError
        Writing failed.
    """
    with made_whole(target) as unfinished:
        specs = specs_of(model)
        write_shards(specs, edited_tensors(model, list(specs), dense, "writing"), unfinished)
        copy_beside(model.directory, unfinished, (INDEX, "config.json", CODE.name))
        write_json(unfinished / "config.json", model.config)
        shutil.copyfile(CODE, unfinished / CODE.name)
        write_card(unfinished, card)
