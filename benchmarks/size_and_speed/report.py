"""Table and plot of sizes and speeds."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import count
from pathlib import Path
from statistics import geometric_mean, median

from benchmarks.reporting.panels import Panel, Reference, Series, StudyFigure, draw, picture
from benchmarks.reporting.rows import Row, Rows
from benchmarks.size_and_speed.programs import (
    DECODE,
    DISK,
    FILES,
    LLAMA_CPP,
    MEMORY,
    PARAMETERS,
    PREFILL,
    PROGRAMS,
)
from espalier.results.figures import PERPLEXITY
from espalier.results.style import series_look

KEYS = ("result", "method", "program", "measure", "note")
FIGURES = ("value", "dense", "ratio", "load")
NOT_SUPPORTED = "not supported"
SAME_SHAPES = "as "
"""Beginnings of notes of programs in which a result was not measured."""
TITLE = "Size, memory, speed and quality of smaller models"
DENSE = "dense"
DENSE_LINE = Reference("dense", 1.0)
MAX_PERPLEXITY = 60.0
"""End of the axis of perplexities, relative to the dense model's."""
Found = Mapping[tuple[str, str], Row]
"""Rows of one result by program and measure."""

TUNED = ", tuned"
"""Ending of the labels of tuned results, which share a row of the figure with the untuned ones."""
SMALLER: tuple[tuple[str, str, str], ...] = (
    ("weights on disk", FILES, DISK),
    ("memory, bfloat16", "transformers bfloat16", MEMORY),
    ("memory, llama.cpp", LLAMA_CPP, MEMORY),
)
"""Name, program and measure of the series of a panel, in which less is better."""
FASTER: tuple[tuple[str, str, str], ...] = tuple(
    (f"{what}, {name}", program, measure)
    for name, program in (("bfloat16", "transformers bfloat16"), ("llama.cpp", LLAMA_CPP))
    for what, measure in (("prompt", PREFILL), ("new tokens", DECODE))
)
"""The same of a panel in which more is better."""


def write_report(rows: Rows, path: Path) -> None:
    """Write ``<path>.md``, and ``<path>.svg`` and ``.png`` if there are rows."""
    results = _by_result(rows)
    path.with_suffix(".md").write_text("\n".join([*_page(rows, results, path), ""]))
    if _measured(results):
        draw(_figure(results), path, TITLE)


def _measured(results: Mapping[str, Found]) -> dict[str, Found]:
    """Return the results that were measured themselves."""
    return {label: found for label, found in results.items() if (PROGRAMS[0], MEMORY) in found}


def _by_result(rows: Rows) -> dict[str, Found]:
    results: dict[str, dict[tuple[str, str], Row]] = {}
    for row in rows.rows:
        results.setdefault(row["result"], {})[row["program"], row["measure"]] = row
    return dict(results)


def _page(rows: Rows, results: Mapping[str, Found], path: Path) -> Iterator[str]:
    given = rows.conditions
    versions = ", ".join(f"{name} {number}" for name, number in given["versions"].items())
    loads = [float(row["load"]) for row in rows.rows if row["load"]]
    yield f"# {TITLE}"
    yield ""
    yield (
        f"Dense model `{given['model']['name']}`. Speeds are tokens per second at batch size 1:"
        f" a prompt of {given['prompt_tokens']} tokens, and {given['new_tokens']} tokens after it."
        f" In brackets: relative to the dense model, which took turns with the result in the same"
        f" process; medians of {given['turns']} turns. Load memory is what the loaded model adds to"
        f" its process. {given['threads']} CPU thread{'s' * (given['threads'] > 1)},"
        f" {given['processor']}, {versions}."
        f" Load of the machine when a measurement began: {min(loads, default=0):.1f} to"
        f" {max(loads, default=0):.1f}."
        f" [Figures](./{path.name}.csv), [conditions](./{path.name}.json)."
    )
    yield ""
    if _measured(results):
        yield picture(path, TITLE)
        yield ""
    yield from _quality(results)
    yield ""
    yield from _speeds(results)
    notes = {
        (row["result"], row["program"]): row["note"]
        for found in results.values()
        for row in found.values()
        if row["note"].startswith(NOT_SUPPORTED)
    }
    if notes:
        yield ""
        yield from (f"- {label}, {program}: {note}" for (label, program), note in notes.items())


def _quality(results: Mapping[str, Found]) -> Iterator[str]:
    """Yield the table of files and perplexities, and where a result's speed stands."""
    texts = _texts(results)
    wanted = [(FILES, PARAMETERS), (FILES, DISK)]
    wanted += [(FILES, f"{PERPLEXITY} {text}") for text in texts]
    heads = ["result", "parameters, M", "disk, MB", *(f"{PERPLEXITY} {text}" for text in texts)]
    yield f"| {' | '.join(heads)} | memory and speed |"
    yield f"|---|{'---:|' * (len(heads) - 1)}---|"
    for label, cells in _lines(results, list(results), wanted):
        yield f"| {label} | {' | '.join(cells)} | {_where(results.get(label, {}))} |"


def _speeds(results: Mapping[str, Found]) -> Iterator[str]:
    """Yield the table of memory and speed of the results that were measured themselves."""
    wanted = [(name, MEMORY) for name in PROGRAMS]
    wanted += [(name, measure) for name in PROGRAMS for measure in (PREFILL, DECODE)]
    heads = ["result", *(f"memory, MB: {name}" for name in PROGRAMS)]
    heads += [f"{what}: {name}" for name in PROGRAMS for what in ("prompt", "new tokens")]
    yield f"| {' | '.join(heads)} |"
    yield f"|---|{'---:|' * (len(heads) - 1)}"
    for label, cells in _lines(results, list(_measured(results)), wanted):
        yield f"| {label} | {' | '.join(cells)} |"


def _lines(
    results: Mapping[str, Found], labels: list[str], wanted: list[tuple[str, str]]
) -> Iterator[tuple[str, list[str]]]:
    """Yield label and cells of the dense model, then of these results."""
    if results:
        yield DENSE, [_dense_cell(results, *one) for one in wanted]
    for label in labels:
        yield label, [_cell(results, label, *one) for one in wanted]


def _where(found: Found) -> str:
    """Return whose memory and speed those of a result are: "below", or "as" another's."""
    notes = (row["note"] for row in found.values())
    return next((note for note in notes if note.startswith(SAME_SHAPES)), "below")


def _texts(results: Mapping[str, Found]) -> list[str]:
    """Return the names of the texts on which perplexity was measured."""
    names = {
        measure.removeprefix(f"{PERPLEXITY} "): None
        for found in results.values()
        for program, measure in found
        if program == FILES and measure.startswith(PERPLEXITY)
    }
    return list(names)


def _cell(results: Mapping[str, Found], label: str, program: str, measure: str) -> str:
    found = results[label]
    row = found.get((program, measure))
    if row is None and measure.startswith(PERPLEXITY):
        return ""
    if row is None:
        note = found[program, ""]["note"] if (program, "") in found else "not measured"
        return note.partition(":")[0]
    value = float(row["value"])
    if row["ratio"]:
        return f"{value:.1f} ({float(row['ratio']):.2f})"
    dense = _dense_perplexities(results).get(measure)
    return f"{value:.1f} ({value / dense:.2f})" if dense else f"{value:.1f}"


def _dense_cell(results: Mapping[str, Found], program: str, measure: str) -> str:
    """Return the median of what was measured of the dense model next to each result."""
    rows = (found.get((program, measure)) for found in results.values())
    values = [float(row["dense"]) for row in rows if row is not None and row["dense"]]
    return f"{median(values):.1f}" if values else ""


def _figure(results: Mapping[str, Found]) -> StudyFigure:
    """Return the figure of the ratios to the dense model: a row for each result."""
    quality = [
        Series(name, look, _by_place(results, ending, _perplexity_ratio))
        for name, look, ending in (
            ("perplexity", series_look(0), ""),
            ("perplexity, tuned", series_look(0)._replace(fill="none"), TUNED),
        )
    ]
    panels = [
        Panel(
            "Perplexity: less is better", "", quality, (DENSE_LINE,), scale="log", start=0.8,
            end=MAX_PERPLEXITY,
        )
    ]  # fmt: skip
    numbers = count(1)
    for title, chosen in (("Size: less is better", SMALLER), ("Speed: more is better", FASTER)):
        series = [
            Series(
                name,
                series_look(next(numbers)),
                _by_place(results, "", partial(_ratio, program=program, measure=measure)),
            )
            for name, program, measure in chosen
        ]
        panels.append(Panel(title, "", series, (DENSE_LINE,)))
    note = "Relative to the dense model; perplexity: geometric mean over texts"
    return StudyFigure(panels, columns=3, note=note, rows=True)


def _by_place(
    results: Mapping[str, Found],
    ending: str,
    ratio: Callable[[Mapping[str, Found], str], float | None],
) -> dict[str, list[float]]:
    """Return the ratios of the results with this ending, tuned or not, by row of the figure."""
    found = {}
    for label in results:
        if label.endswith(TUNED) == bool(ending) and (value := ratio(results, label)) is not None:
            found[label.removesuffix(TUNED)] = [value]
    return found


def _ratio(results: Mapping[str, Found], label: str, program: str, measure: str) -> float | None:
    """Return a ratio to the dense model, of a result or of the one that has its shapes."""
    if label == DENSE:
        return 1.0
    found = results.get(label, {})
    row = found.get((program, measure))
    if row is not None and row["ratio"]:
        return float(row["ratio"])
    where = _where(found)
    return (
        _ratio(results, where.removeprefix(SAME_SHAPES), program, measure)
        if (where.startswith(SAME_SHAPES))
        else None
    )


def _perplexity_ratio(results: Mapping[str, Found], label: str) -> float | None:
    """Return the geometric mean of a result's perplexities relative to the dense model's."""
    dense = _dense_perplexities(results)
    ratios = [
        float(row["ratio"]) if row["ratio"] else float(row["value"]) / dense[measure]
        for (program, measure), row in results[label].items()
        if program == FILES and measure in dense
    ]
    return geometric_mean(ratios) if ratios else None


def _dense_perplexities(results: Mapping[str, Found]) -> dict[str, float]:
    """Return the dense model's perplexity by measure, from the runs that started from it."""
    return {
        measure: float(row["dense"])
        for found in results.values()
        for (program, measure), row in found.items()
        if program == FILES and measure.startswith(PERPLEXITY) and row["dense"]
    }
