"""``espalier run METHOD --recover``: prune a model, then tune the result with the same clients."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from espalier.cli.run_request import RunRequest, run_to_end
from espalier.errors import InputError
from espalier.launch.app import default_config, find_app, run_in_app
from espalier.launch.configuration import configuration, read_pair
from espalier.launch.presets import read_preset
from espalier.settings.keys import changed, concerns, flatten, unread
from espalier.settings.pruning import PruningSettings, SmallerSettings
from espalier.settings.registry import METHODS
from espalier.settings.run import RunSettings

PRESET = "recover"
LABELS = ("pruned", "tuned")
OF_ONE_RUN = ("method", "model", "resume-from")
"""Settings that the second run does not take from the first one."""


def run_and_recover(request: RunRequest) -> int:
    """Prune a model, tune the result, and return the exit code of the command.

    Settings of the command line and of its preset hold for each run that reads them, and replace
    those of the preset ``recover``. Both runs' settings are checked before the first one starts.

    Raises
    ------
    InputError
        The run is on a SuperLink, or its method tunes already; or settings are wrong.
    """
    if request.superlink is not None:
        raise InputError(
            "--recover: is for simulations, because a result on a SuperLink is on that machine; run"
            f" the method, then `espalier run {PRESET} model=...`"
        )
    app = find_app(request.app)
    own, further = words_of_runs(app, request.words)
    _, settings = configuration(app, own, on_this_machine=True)
    if METHODS[settings.method].tunes:
        raise InputError(
            f"--recover: {settings.method} tunes the model itself; leave --recover out, or choose a"
            " method that prunes"
        )
    keep_zeros = "lora.keep-zeros="
    if has_zeros(settings) and not any(word.startswith(keep_zeros) for word in further):
        further.append(f"{keep_zeros}true")
    # The model of the first run stands for its result.
    configuration(app, [*further, f"model={settings.model}"], on_this_machine=True)
    code, directory = run_to_end(replace(request, words=own))
    if code:
        return code
    words = [*further, f"model={Path(directory) / 'model'}"]
    arguments = ["run", *words, *_options(request)]
    code, tuned = run_to_end(replace(request, words=words, arguments=arguments))
    return code or _show(app, [directory, tuned])


def _show(app: Path, runs: Sequence[str]) -> int:
    """Print dense, pruned and tuned model in one table; return the exit code, which is 0.

    Both runs are complete, also if they cannot be compared.
    """
    document = {"runs": runs, "labels": LABELS, "out": [], "metric": "", "against": ""}
    print("\nthe original model, and what the two runs made of it", flush=True)
    run_in_app(app, "espalier.results.comparison.command", document)
    return 0


def words_of_runs(app: Path, words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words of the run that prunes, and those of the run that tunes, without its model.

    A setting that neither reads stays with the first run, which refuses it.
    """
    defaults = flatten(default_config(app))
    presets = [word for word in words if "=" not in word]
    pairs = {word: read_pair(word, defaults) for word in words if "=" in word}
    given = dict(pairs.values())
    preset = flatten(read_preset(app, presets[0])) if presets else {}
    recover = flatten(read_preset(app, PRESET))
    inherited = {
        f"{key}={value if isinstance(value, str) else json.dumps(value)}": (key, value)
        for key, value in preset.items()
        if key in changed(preset) and key not in given
    }
    pruning = {**defaults, **preset, **given}
    tuning = {**recover, **dict(inherited.values()), **given, "method": recover["method"]}
    further = [
        word
        for word, (key, _) in {**inherited, **pairs}.items()
        if key not in OF_ONE_RUN and _is_read(key, tuning)
    ]
    moved = {word for word in further if word in pairs and not _is_read(pairs[word][0], pruning)}
    return [word for word in words if word not in moved], [PRESET, *further]


def _is_read(key: str, flat: Mapping[str, Any]) -> bool:
    """Return whether a run with these settings reads a key."""
    return concerns(key, str(flat["method"])) and key not in unread(flat)


def _options(request: RunRequest) -> list[str]:
    """Return the options of the command that both runs have."""
    options = [] if request.measures else ["--no-measure"]
    if request.app is not None:
        options += ["--app", request.app]
    if request.gpus_per_client:
        options += ["--gpus-per-client", str(request.gpus_per_client)]
    return options


def has_zeros(settings: RunSettings) -> bool:
    """Return whether a run sets weights to zero, and does not make its model smaller."""
    job = settings.job
    return isinstance(job, PruningSettings) or (
        isinstance(job, SmallerSettings) and job.form == "zero-filled"
    )
