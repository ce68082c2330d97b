"""Comparison of runs: which can be compared, by which measures, and what differs."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from espalier.errors import EspalierError, InputError
from espalier.identity.names import printable
from espalier.results.base_chain import KEY, Base, read_chain
from espalier.results.figures import (
    DENSE,
    FEDERATED,
    Quality,
    Size,
    evaluated,
    main_quality,
    size_of,
)
from espalier.results.finished_run import FinishedRun, open_run
from espalier.results.model_chain import has_original_base, runs_behind
from espalier.results.run_status import (
    COMPLETED,
    FAILED,
    INTERRUPTED,
    LONGEST_REASON,
    RUNNING,
    run_status,
)
from espalier.settings.keys import default_values
from espalier.settings.run import of_the_result
from espalier.settings.tables.evaluation import OWN_TEXT

DEFAULTS = default_values()
RUNS = "runs"
"""Default folder of runs, whose name says nothing about one."""
HASH = 12
"""Number of characters of a hash in a message."""
NOT_COMPLETED = {
    FAILED: "the run failed",
    INTERRUPTED: "the run was interrupted",
    RUNNING: "the run is at work",
}
SIZES_DIFFER = 0.005
"""Relative difference of two sizes from which a plot shows quality against size."""


@dataclass(frozen=True)
class Entry:
    """One run of a comparison."""

    label: str
    run: FinishedRun

    @property
    def method(self) -> str:
        """Method of the run."""
        return str(self.run.summary.get("method"))

    @cached_property
    def chain(self) -> list[FinishedRun]:
        """Runs that led to the result, the oldest first."""
        return runs_behind(self.run)

    @property
    def base(self) -> str:
        """Hash of the model with which the chain began."""
        return self._first.sha256

    @property
    def base_name(self) -> str:
        """Name of that model."""
        return self._first.model or self.base[:HASH]

    @property
    def _first(self) -> Base:
        """Model with which the chain began, also if the run that used it is gone."""
        summary = self.chain[0].summary
        if not self.is_whole:
            return read_chain(summary[KEY])[-1]
        sha256 = str(summary.get("model_sha256"))
        return Base(str(summary.get("model") or ""), None, sha256, "")

    @property
    def is_whole(self) -> bool:
        """True if all runs of the chain are there."""
        return has_original_base(self.chain[0])

    @property
    def gone(self) -> str:
        """Name of the run of the chain that is missing; empty if none is."""
        if self.is_whole:
            return ""
        return Path(str(read_chain(self.chain[0].summary[KEY])[0].run)).name

    @cached_property
    def qualities(self) -> dict[tuple[str, str], Quality]:
        """Measures of the result by dataset and metric."""
        return {one.key: one for one in evaluated(self.run)}

    @cached_property
    def written(self) -> Size:
        """Size of the result as it was written."""
        return size_of(self.run, FEDERATED)

    @property
    def used(self) -> Size:
        """Size of what is loaded to use the result: an adapter with its base model."""
        return self.written.with_base(size_of(self.run, DENSE))

    @property
    def original(self) -> Size:
        """Size of the model with which the chain began; unknown if its run is gone."""
        return size_of(self.chain[0], DENSE) if self.is_whole else Size()

    def total(self, key: str) -> float | None:
        """Return the sum of a number of the summaries over the chain; None if one is missing."""
        if not self.is_whole:
            return None
        values = [run.summary.get(key) for run in self.chain]
        known = [value for value in values if value is not None]
        return sum(known) if len(known) == len(values) else None

    def cost(self, name: str) -> float | None:
        """Return ``parameters`` or bytes on ``disk`` of the model in use, ``bytes`` or ``seconds``.

        Bytes and seconds are those of all runs of the chain.
        """
        if name == "parameters":
            return self.used.parameters
        if name == "disk":
            return self.used.num_bytes
        if name == "seconds":
            return self.total("seconds")
        up = self.total("bytes_up")
        down = self.total("bytes_down")
        return None if up is None or down is None else up + down

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Settings by dotted key that the result depends on."""
        return of_the_result(self.run.settings)


@dataclass(frozen=True)
class Comparison:
    """Runs that can be compared, and the ones that cannot."""

    entries: Sequence[Entry]
    excluded: Mapping[str, str]
    """Reason by label of each run that cannot be compared."""
    columns: Sequence[Quality]
    """Measures with at least one value, as the first run has them that has them."""
    gaps: Sequence[str]
    """Sentences about values that are left out because they rest on other samples."""
    values: Mapping[tuple[int, tuple[str, str]], float]
    """Value by index of the run, and dataset and metric."""

    @cached_property
    def differing(self) -> dict[str, list[Any]]:
        """Values of the settings that differ, in the order of the runs; None for a missing key.

        A key that another method does not have is listed only if its value is not the default.
        """
        keys = dict.fromkeys(key for entry in self.entries for key in entry.settings)
        found = {key: [entry.settings.get(key) for entry in self.entries] for key in keys}
        return {key: values for key, values in found.items() if _differ(values, DEFAULTS.get(key))}

    def quality(self, name: str) -> Quality:
        """Return the measure for a plot: by dataset, or dataset and metric; the main one if empty.

        Raises
        ------
        InputError
            There is no such measure; the message lists all.
        """
        if not name:
            main = main_quality(self.entries[0].run)
            chosen = [one for one in self.columns if main is not None and one.key == main.key]
            return chosen[0] if chosen else self.columns[0]
        for one in self.columns:
            if name in (one.title, one.dataset, one.metric):
                return one
        raise InputError(
            f"--metric {name!r}: these runs have"
            f" {', '.join(repr(one.title) for one in self.columns)}; name one of them, or first a"
            " run with another measure"
        )

    def axis(self, name: str) -> str:
        """Return the cost for a plot: the given one, or parameters if they differ, else bytes."""
        if name:
            return name
        sizes = [size for entry in self.entries if (size := entry.cost("parameters")) is not None]
        if sizes and max(sizes) > min(sizes) * (1 + SIZES_DIFFER):
            return "parameters"
        return "bytes"

    def dense(self, quality: Quality) -> float | None:
        """Return the value of the original model, if a run started from it and evaluated it."""
        for index, entry in enumerate(self.entries):
            # In a longer chain, the dense model of a run is the result of the run before.
            is_first = len(entry.chain) == 1 and entry.is_whole
            if is_first and (index, quality.key) in self.values:
                return entry.qualities[quality.key].values.get(DENSE)
        return None


def _differ(values: Sequence[Any], default: Any) -> bool:
    known = [value for value in values if value is not None]
    if any(value != known[0] for value in known):
        return True
    return len(known) < len(values) and known[0] != default


def opened(folders: Sequence[Path], labels: Sequence[str]) -> tuple[list[Entry], dict[str, str]]:
    """Return the completed runs with their labels, and the reason for each other run."""
    entries: list[Entry] = []
    excluded: dict[str, str] = {}
    for folder, label in zip(folders, labels, strict=True):
        try:
            status, reason = run_status(folder)
            if status == COMPLETED:
                entries.append(Entry(label, open_run(folder)))
            else:
                why = f": {printable(reason, LONGEST_REASON)}" if reason else ""
                excluded[label] = f"{NOT_COMPLETED.get(status, status)}{why}"
        except EspalierError as error:
            excluded[label] = str(error)
    return entries, excluded


def _labels(folders: Sequence[Path]) -> list[str]:
    """Return a name for each directory.

    It is that of its folder if each run lies in a folder of its own; otherwise its own name, with
    as many parents as are needed to tell all apart.
    """
    if not folders:
        return []
    parts = [folder.absolute().parts for folder in folders]
    common = len(Path(os.path.commonpath([folder.absolute() for folder in folders])).parts)
    folders_of_runs = {part[common] for part in parts if len(part) > common + 1}
    if len(folders_of_runs) == len(parts) and RUNS not in folders_of_runs:
        return [part[common] for part in parts]
    for length in range(1, max(map(len, parts), default=0) + 1):
        labels = ["/".join(part[-length:]) for part in parts]
        if len(set(labels)) == len(labels):
            return labels
    return [str(folder) for folder in folders]


def compare(folders: Sequence[Path], labels: Sequence[str] = ()) -> Comparison:
    """Compare the completed runs in these directories with the first of them.

    A run is left out if it is not completed, if its chain started from another base model, or if
    none of its measures rests on the samples of another run. If none is left beside the first, the
    next run takes its place.

    Parameters
    ----------
    folders : run directories
    labels : names of the runs; by default the names of the directories

    Raises
    ------
    InputError
        Fewer than two runs can be compared although more were named; the message has the reasons.
    """
    entries, excluded = opened(folders, labels or _labels(folders))
    readable = []
    for entry in entries:
        try:
            _require_readable(entry)
        except EspalierError as error:
            excluded[entry.label] = str(error)
        else:
            readable.append(entry)
    with_first = _compared(readable, excluded)
    least = min(2, len(folders))
    if len(with_first.entries) >= least:
        return with_first
    for place, entry in enumerate(readable[1:], start=1):
        found = _compared([entry, *readable[:place], *readable[place + 1 :]], excluded)
        if len(found.entries) >= least:
            return found
    raise InputError(_refusal(with_first.entries, with_first.excluded))


def _compared(entries: Sequence[Entry], unusable: Mapping[str, str]) -> Comparison:
    """Compare runs with the first of them; ``unusable`` has the reasons of runs left out before."""
    excluded = dict(unusable)
    chosen: list[Entry] = []
    columns: dict[tuple[str, str], tuple[Entry, Quality]] = {}
    values: dict[tuple[int, tuple[str, str]], float] = {}
    gaps: list[str] = []
    for entry in entries:
        # ``columns`` has the first run with each measure, to which all later ones are compared.
        own, missing = _comparable(entry, columns)
        if reason := _why_not(entry, chosen, own, missing):
            excluded[entry.label] = reason
            continue
        columns |= {key: (entry, one) for key, one in own.items() if key not in columns}
        gaps += [f"{entry.label}: {sentence}" for sentence in missing]
        for key, quality in own.items():
            if (value := quality.values[FEDERATED]) is not None:
                # The run is appended to ``chosen`` below, so this is its index.
                values[len(chosen), key] = value
        chosen.append(entry)
    measures = [quality for _, quality in columns.values()]
    return Comparison(chosen, excluded, measures, gaps, values)


def _require_readable(entry: Entry) -> None:
    """Read all that a comparison needs; raise InputError if a file of the run is damaged."""
    for name in ("parameters", "disk", "bytes", "seconds"):
        # Each cost reads the summaries of the whole chain.
        entry.cost(name)
    entry.settings  # noqa: B018


def _comparable(
    entry: Entry, columns: Mapping[tuple[str, str], tuple[Entry, Quality]]
) -> tuple[dict[tuple[str, str], Quality], list[str]]:
    """Return the measures of a run that are new or rest on the same samples as an earlier run's.

    The second value has a sentence for each of the others.
    """
    own: dict[tuple[str, str], Quality] = {}
    missing = []
    for key, quality in entry.qualities.items():
        other, same = columns.get(key, (entry, quality))
        if difference := _other_samples(entry, quality, other, same):
            missing.append(f"{quality.title} is left out: {difference}")
        else:
            own[key] = quality
    return own, missing


def _why_not(
    entry: Entry,
    chosen: Sequence[Entry],
    own: Mapping[tuple[str, str], Quality],
    missing: Sequence[str],
) -> str:
    """Return the reason why a run cannot be compared with those before it; empty if it can."""
    if not entry.qualities:
        return "its result was not evaluated"
    if not chosen:
        return ""
    first = chosen[0]
    if entry.base != first.base:
        return (
            f"other base model: {entry.base_name} ({entry.base[:HASH]}), where {first.label} has"
            f" {first.base_name} ({first.base[:HASH]})"
        )
    shared = own.keys() & {key for one in chosen for key in one.qualities}
    if shared:
        return ""
    if missing:
        return f"other evaluation texts: {'; '.join(missing)}"
    titles = ", ".join(one.title for one in entry.qualities.values())
    others = ", ".join(one.title for one in first.qualities.values())
    return (
        f"other evaluation texts: {titles}, where {first.label} has {others}; repeat one run with"
        " the other's evaluation.texts or task.test-path"
    )


def _other_samples(one: Entry, quality: Quality, other: Entry, same: Quality) -> str:
    """Return how the samples of two runs on one dataset differ; empty if they are the same."""
    if one is other:
        return ""
    mine, theirs = _origin(one, quality.dataset), _origin(other, same.dataset)
    different = [
        f"{key} = {mine[key]!r}, where {other.label} has {theirs.get(key)!r}"
        for key in mine
        if mine[key] != theirs.get(key)
    ]
    # The hashes decide, because different settings may give the same samples.
    if quality.sha256 is not None and same.sha256 is not None:
        if quality.sha256 == same.sha256:
            return ""
        return "; ".join(different) or f"the file has other contents than in {other.label}"
    return "; ".join(different)


def _origin(entry: Entry, dataset: str) -> dict[str, Any]:
    """Return the settings that determine the samples of a dataset."""
    settings = entry.settings
    data = [key for key in settings if key.startswith("data.")]
    if dataset == OWN_TEXT:
        return {key: settings.get(key) for key in ("num-clients", "seed", *data)}
    if dataset == settings.get("task.name"):
        names = ("name", "test-path", "max-test-items", "max-test-tokens", "chat-template")
        keys = [*(f"task.{name}" for name in names), "data.prompt", "data.labels", "data.columns"]
        return {key: settings.get(key) for key in keys}
    texts = [part.strip() for part in str(settings.get("evaluation.texts")).split(",")]
    own = next((text for text in texts if text.partition("=")[0].strip() == dataset), "")
    keys = ["evaluation.sequence-length", "evaluation.max-samples"]
    return {"evaluation.texts": own, **{key: settings.get(key) for key in keys}}


def _refusal(chosen: Sequence[Entry], excluded: Mapping[str, str]) -> str:
    lines = [f"{label}: {reason}" for label, reason in excluded.items()]
    with_whom = f" with {chosen[0].label}" if chosen else ""
    return "\n  ".join([f"no run can be compared{with_whom}:", *lines])


def best_of(values: Sequence[float | None], *, lower_is_better: bool) -> float | None:
    """Return the best value; None if there is none."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return None
    return min(known) if lower_is_better else max(known)
