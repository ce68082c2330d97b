"""Write a sliced model: its tensors, and the code that builds it (``modeling_sliced.py``) beside them.

transformers runs the code with ``trust_remote_code=True``; where Espalier is installed importing that module is enough.
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
"""The module that an export has a copy of."""


def export_sliced(model: OpenedModel, target: Path, card: str = "") -> None:
    """Write a sliced model, in the dtypes of the base's files.

    The directory appears whole or not at all; tensors are read, rotated and written one at a time.

    Raises
    ------
    Mistake
        The file system refused.
    """
    with made_whole(target) as unfinished:
        specs = specs_of(model)
        write_shards(specs, edited_tensors(model, list(specs), dense, "writing"), unfinished)
        copy_beside(model.directory, unfinished, (INDEX, "config.json", CODE.name))
        write_json(unfinished / "config.json", model.config)
        shutil.copyfile(CODE, unfinished / CODE.name)
        write_card(unfinished, card)
