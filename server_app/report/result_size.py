"""Results on disk: sizes of a result and its base, and results of a failed run."""

import os
import shutil
from contextlib import suppress
from math import prod
from pathlib import Path
from statistics import fmean

from safetensors import safe_open

from espalier.amounts import size
from espalier.hf.opening.opened_model import OpenedModel
from espalier.results.figures import Size
from espalier.results.finished_run import ADAPTER, CLIENTS, MODEL
from espalier.settings.keys import table_of
from espalier.settings.run import RunSettings
from espalier.settings.shared_keys import fields_by_key

HOW_MUCH_GOES = ("ratio", "width-pruning-ratio")
"""Keys of the methods' tables that determine how small a model becomes."""
TOLERANCE = 0.005
"""Fraction by which files may differ, due to headers and names, and still count as equal."""


def size_of_base(model: OpenedModel) -> Size:
    """Return the size of a model in its files."""
    files = {stored.shard for stored in model.checkpoint.tensors.values()}
    return Size(model.plan.num_parameters, sum(file.stat().st_size for file in files))


def size_of_result(run_directory: Path, *, personal: bool) -> Size | None:
    """Return the size of a run's result; None if no weights were written here.

    Parameters
    ----------
    personal : whether each client has its own model, which a simulation collects
    """
    if personal:
        # Each client's model has a size of its own.
        counts = [_counts(folder) for folder in (run_directory / CLIENTS).glob("*")]
        if not counts:
            return None
        parameters, num_bytes = (fmean(values) for values in zip(*counts, strict=True))
        return Size(parameters, num_bytes, CLIENTS)
    for name in (MODEL, ADAPTER):
        if (run_directory / name).is_dir():
            return Size(*_counts(run_directory / name), name)
    return None


def _counts(folder: Path) -> tuple[int, int]:
    """Return parameters and bytes of a folder's safetensors files; only headers are read."""
    parameters = num_bytes = 0
    for file in sorted(folder.rglob("*.safetensors")):
        num_bytes += file.stat().st_size
        with safe_open(file, framework="numpy") as tensors:
            parameters += sum(prod(tensors.get_slice(key).get_shape()) for key in tensors.keys())  # noqa: SIM118
    return parameters, num_bytes


def larger_than_base(base: Size, result: Size | None, settings: RunSettings) -> list[str]:
    """Return a warning if a result has more parameters, or needs more disk space, than its base.

    There is no warning for an adapter, which is always used together with the base.
    """
    if result is None or result.is_adapter:
        return []
    more = [
        # Both values with their ratio.
        f"{shown(now)} {what}, where the base has {shown(then)} ({now / then:.1%})"
        for what, now, then, shown in (
            ("parameters", result.parameters, base.parameters, "{:,.0f}".format),
            ("on disk", result.num_bytes, base.num_bytes, size),
        )
        if now is not None and then and now > then * (1 + TOLERANCE)
    ]
    if not more:
        return []
    keys = [
        f"{table_of(settings.method, key)}.{key}"
        for key in HOW_MUCH_GOES
        if key in fields_by_key(type(settings.job))
    ]
    remedy = f"; raise {keys[0]} to make it smaller" if keys else ""
    return [f"the result is larger than its base: {', '.join(more)}{remedy}"]


RESULTS = (MODEL, ADAPTER, CLIENTS, "generator.safetensors")
"""Names in the run directory that other programs take for a run's result."""
FAILED = "failed-"


def set_aside(folder: Path) -> None:
    """Rename the results in a run directory, for example to ``failed-model``.

    Earlier results with these names are replaced.
    """
    for name in RESULTS:
        # On a damaged disk, the run's own error is the one to report.
        with suppress(OSError):
            if (folder / name).exists():
                _remove(folder / f"{FAILED}{name}")
                os.rename(folder / name, folder / f"{FAILED}{name}")


def remove_set_aside(folder: Path) -> None:
    """Delete the renamed results of an earlier attempt after the run has completed."""
    for name in RESULTS:
        with suppress(OSError):
            _remove(folder / f"{FAILED}{name}")


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
