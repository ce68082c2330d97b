"""``espalier export``: results for transformers, llama.cpp and the Hugging Face hub."""

import os
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from espalier.errors import EspalierError, InputError, tell
from espalier.hf.export.loading_code import loading_code
from espalier.hf.export.model import CARD, ExportError, replacing_folder, write_card
from espalier.hf.families import has_own_code
from espalier.hf.opening.opened_model import OpenedModel
from espalier.models.adapter_config import num_labels_of
from espalier.progress import Throttle, progress_listener
from espalier.results.export.card import card_of
from espalier.results.export.hub_export import prepared, push
from espalier.results.export.transformers_export import (
    export_model,
    require_new,
)
from espalier.results.sources import Source, open_source

TRANSFORMERS = "transformers"
GGUF = "gguf"
IMATRIX = "imatrix"
HUB = "hub"
TARGETS_OF = {
    "adapter": (TRANSFORMERS, GGUF, HUB),
    "client": (TRANSFORMERS, GGUF, HUB),
    "dtype": (GGUF,),
    "repository": (HUB,),
    "private": (HUB,),
    "license": (TRANSFORMERS, HUB),
}
"""Targets that read an option."""
NOT_WITH_ADAPTER = ("client", "dtype")
"""Options that do not apply to an adapter: a client's own model has none."""
MAX_THREADS = 4
"""Maximum number of CPU threads of the comparison; exports are small work."""


def main(document: Mapping[str, Any]) -> int:
    """Export what the document names, and return the exit code.

    Parameters
    ----------
    document : ``source``, ``to``, ``out``, ``adapter``, ``client``, ``base``, ``dtype``,
        ``repository``, ``private`` and ``license``, as ``espalier.cli.export`` gives them
    """
    try:
        with progress_listener(Throttle(lambda line: print(f"exporting    {line}", flush=True))):
            _export(document)
    except (EspalierError, ExportError) as error:
        tell(error)
        return 2
    return 0


def _export(document: Mapping[str, Any]) -> None:
    target = require_new(document["out"])
    _require_used(document)
    # Refuse a bad repository or account before the result is opened.
    upload = prepared(document["repository"]) if document["to"] == HUB else None
    source = open_source(
        document["source"],
        adapter=document["adapter"],
        client=document["client"],
        base=document["base"],
    )
    if document["to"] == GGUF:
        _to_gguf(source, target, document)
        return
    if document["to"] == IMATRIX:
        _to_imatrix(source, target)
        return
    if upload is not None:
        # Nothing is written if the licence of the base model is not known.
        upload.take(source, as_adapter=document["adapter"], license_name=document["license"])
    license_name = document["license"] if upload is None else upload.license_name
    as_adapter = document["adapter"]
    card = card_of(source, as_adapter, license_name, document["repository"])
    if as_adapter:
        _copy_adapter(source, target, card)
    else:
        export_model(source, target, card, min(MAX_THREADS, os.cpu_count() or 1))
    print(f"exported     {target}")
    if upload is None:
        print(f"use it       {_how_to_use(source, target, as_adapter=as_adapter)}")
    else:
        address = push(upload, target, private=document["private"])
        print(f"uploaded     {address}")


def _require_used(document: Mapping[str, Any]) -> None:
    """Raise InputError if an option does not apply to the target, or not to an adapter."""
    given = [option for option in TARGETS_OF if document[option]]
    for option in given:
        if document["to"] not in TARGETS_OF[option]:
            raise InputError(f"--{option}: does not apply to --to {document['to']}; leave it out")
        if document["adapter"] and option in NOT_WITH_ADAPTER:
            raise InputError(f"--{option}: does not apply to --adapter; leave one of them out")


def _to_gguf(source: Source, target: Path, document: Mapping[str, Any]) -> None:
    from espalier.hf.gguf.adapter_file import write_adapter
    from espalier.hf.gguf.library import require_gguf
    from espalier.hf.gguf.model_file import write_model

    require_gguf()
    as_adapter = document["adapter"]
    file = target / ("adapter.gguf" if as_adapter else "model.gguf")
    with replacing_folder(target) as folder:
        place = folder / file.name
        if as_adapter:
            name = write_adapter(source.model, source.adapted, place, source.title)
        else:
            name = write_model(source.model, source.edits, place, source.title, document["dtype"])
    print(f"exported     {file} (architecture {name})")
    written = shlex.quote(str(file))
    if as_adapter:
        base = shlex.quote(str(source.model.directory))
        print(
            f"with         the base model as GGUF: espalier export {base} --to gguf --out DIR\n"
            f"use it       llama-cli -m DIR/model.gguf --lora {written}"
        )
    else:
        print(f"use it       llama-cli -m {written}")


def _to_imatrix(source: Source, target: Path) -> None:
    from espalier.hf.gguf.importance_file import write_importance
    from espalier.hf.gguf.library import require_gguf
    from espalier.results.input_sums import read_sums

    require_gguf(IMATRIX)
    if source.run is None:
        raise InputError(
            f"{source.folder}: is a model directory; --to {IMATRIX} needs a run of pooled-pruning"
        )
    input_sums = read_sums(source.run, source.model.plan)
    words = f"calibration samples of the clients of {source.title}"
    file = target / "imatrix.gguf"
    with replacing_folder(target) as folder:
        name = write_importance(
            source.model,
            input_sums.sums,
            input_sums.counts,
            input_sums.sequence_length,
            folder / file.name,
            [words],
        )
    if source.run.summary.get("privacy"):
        print(
            "note         the sums have the noise of differential privacy: channels that it made"
            " negative count as 0, and each client counts once"
        )
    print(
        f"exported     {file} (architecture {name})\n"
        f"use it       llama-quantize --imatrix {file} DIR/model.gguf DIR/small.gguf Q4_K_M"
    )


def _copy_adapter(source: Source, target: Path, card: str) -> None:
    """Copy an adapter and its tokenizer, with a complete card."""
    with replacing_folder(target) as folder:
        for file in sorted(source.folder.iterdir()):
            if file.is_file() and file.name != CARD:
                shutil.copyfile(file, folder / file.name)
        write_card(folder, card)


def _how_to_use(source: Source, target: Path, *, as_adapter: bool) -> str:
    """Return the line of Python that loads an export."""
    # An exported model may need no code, although the result does.
    config = source.model.config if as_adapter else OpenedModel(target).config
    decoder = source.model.family.kind == "decoder"
    lines = loading_code(
        str(target),
        decoder=decoder,
        as_adapter=as_adapter,
        own_code=has_own_code(config),
        num_labels=0 if decoder or not as_adapter else num_labels_of(source.folder),
    )
    return lines.splitlines()[-1]
