"""Make the directory of a new run, or open the one of a run that is to be resumed."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import tomli_w

from espalier.modeling.opened import OpenedModel
from espalier.settings.mistakes import Mistake
from espalier.settings.run import NOT_PART_OF_THE_RESULT, RunSettings
from espalier.storage.atomic import write_bytes, write_json
from espalier.storage.blobs import sha256
from strategies.run_folder import RunFolder

FILE = "run.json"
"""What a run is: its lineage, and the settings and model that a resumption must share."""


def open_run_directory(settings: RunSettings, model: OpenedModel, run_id: str) -> tuple[RunFolder, str]:
    """Make or open the run directory; returns it with the run's lineage.

    Raises
    ------
    Mistake
        The directory cannot be written; or ``resume-from`` is no run directory, its run has ended well, or it had other
        settings (each is named) or another model.
    """
    if settings.resume_from:
        return _resume(settings, model)
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    path = Path(settings.out_dir).expanduser().absolute() / f"{stamp}-{settings.method}-{run_id}"
    try:
        folder = RunFolder(path)
    except OSError as error:
        raise Mistake(
            f"out-dir = {settings.out_dir!r}: {path} cannot be made ({error.strerror}); name another directory"
        ) from None
    lineage = f"{stamp}-{sha256(run_id.encode())[:12]}"  # of one length for all runs, so that equal runs send equal bytes
    write_json(path / FILE, {"lineage": lineage, "model_sha256": model.sha256, "settings": _of_the_result(settings)})
    write_bytes(path / "settings.toml", tomli_w.dumps(settings.nested()).encode())
    return folder, lineage


def _resume(settings: RunSettings, model: OpenedModel) -> tuple[RunFolder, str]:
    given = f"resume-from = {settings.resume_from!r}"
    path = Path(settings.resume_from).expanduser().absolute()
    try:
        was = json.loads((path / FILE).read_text())
    except (OSError, ValueError):
        raise Mistake(f"{given}: {path} is not a run directory") from None
    summary = path / "summary.json"
    if summary.exists() and json.loads(summary.read_text())["status"] == "completed":
        raise Mistake(f"{given}: that run is completed; leave resume-from empty for a new run")
    now = _of_the_result(settings)
    before = was["settings"]
    changed = [key for key in sorted(now.keys() | before.keys()) if before.get(key) != now.get(key)]
    differing = [f"{key} was {before.get(key)!r}, is {now.get(key)!r}" for key in changed]
    if was["model_sha256"] != model.sha256:
        differing.append("the base model is another one")
    if differing:
        raise Mistake(f"{given}: a resumed run keeps its settings, but {'; '.join(differing)}")
    return RunFolder(path), was["lineage"]


def _of_the_result(settings: RunSettings) -> dict[str, Any]:
    """The settings that the result depends on, flat."""
    flat: dict[str, Any] = {}
    for key, value in settings.nested().items():
        if key in NOT_PART_OF_THE_RESULT:
            continue
        flat |= {f"{key}.{name}": inner for name, inner in value.items()} if isinstance(value, dict) else {key: value}
    return flat
