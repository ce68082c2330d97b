"""Table and plot of sizes and speeds."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.reporting.panels import heading_of, picture
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
from espalier.results.style import GREY, STUDY_WIDTH, new_figure, save_figure, series_look

KEYS = ("result", "method", "program", "measure", "note")
FIGURES = ("value", "dense", "ratio", "load")
NOT_SUPPORTED = "not supported"
SAME_SHAPES = "as "
"""Beginnings of notes of programs in which a result was not measured."""
TITLE = "Size, memory and speed of smaller models"
Found = Mapping[tuple[str, str], Row]
"""Rows of one result by program and measure."""

SMALLER: tuple[tuple[str, str, str], ...] = (
    ("parameters", FILES, PARAMETERS),
    ("weights on disk", FILES, DISK),
    ("memory, bfloat16", "transformers bfloat16", MEMORY),
    ("memory, llama.cpp", LLAMA_CPP, MEMORY),
)
"""Name, program and measure of the left panel, in which less is better."""
FASTER: tuple[tuple[str, str, str], ...] = tuple(
    (f"{what}, {program.removeprefix('transformers ').partition(' ')[0]}", program, measure)
    for program in PROGRAMS
    for what, measure in (("prompt", PREFILL), ("new tokens", DECODE))
)
"""The same of the right panel, in which more is better."""


def write_report(rows: Rows, path: Path) -> None:
    """Write ``<path>.md``, and ``<path>.svg`` and ``.png`` if there are rows."""
    results = _by_result(rows)
    path.with_suffix(".md").write_text("\n".join([*_page(rows, results, path), ""]))
    if measured := _measured(results):
        _draw(measured, path)


def _measured(results: Mapping[str, Found]) -> dict[str, Found]:
    """Return the results that were measured themselves, which the figure shows."""
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
        yield "dense", [_dense_cell(results, *one) for one in wanted]
    for label in labels:
        yield label, [_cell(results[label], *one) for one in wanted]


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


def _cell(found: Found, program: str, measure: str) -> str:
    row = found.get((program, measure))
    if row is None:
        note = found[program, ""]["note"] if (program, "") in found else "not measured"
        return note.partition(":")[0]
    if not row["ratio"]:
        return f"{float(row['value']):.1f}"
    return f"{float(row['value']):.1f} ({float(row['ratio']):.2f})"


def _dense_cell(results: Mapping[str, Found], program: str, measure: str) -> str:
    """Return the median of what was measured of the dense model next to each result."""
    from statistics import median

    rows = (found.get((program, measure)) for found in results.values())
    values = [float(row["dense"]) for row in rows if row is not None and row["dense"]]
    return f"{median(values):.1f}" if values else ""


def _draw(results: Mapping[str, Found], path: Path) -> None:
    """Draw the ratios to the dense model: a line of markers for each result."""
    labels = list(results)
    heading = heading_of(path, TITLE)
    with new_figure(200 + 42 * len(labels) + 20 * heading.count("\n"), STUDY_WIDTH) as figure:
        axes = figure.subplots(1, 2, sharey=True)
        figure.suptitle(heading, x=0.01, ha="left", weight="bold")
        panels = (("What it needs: less is better", SMALLER), ("Speed: more is better", FASTER))
        for panel, (title, series) in zip(axes, panels, strict=True):
            for number, (name, program, measure) in enumerate(series):
                points = [
                    (float(row["ratio"]), place)
                    for place, label in enumerate(labels)
                    if (row := results[label].get((program, measure))) and row["ratio"]
                ]
                look = series_look(number)
                panel.plot(
                    [ratio for ratio, _ in points],
                    [place for _, place in points],
                    linestyle="",
                    marker=look.marker,
                    color=look.colour,
                    label=name,
                    alpha=0.85,
                )
            panel.axvline(1, color=GREY, linewidth=1)
            panel.set_title(title)
            panel.set_xlabel("relative to the dense model")
            side = "left" if panel is axes[0] else "right"
            handles = panel.get_legend_handles_labels()
            figure.legend(*handles, loc=f"outside lower {side}", ncols=2, fontsize=9)
        for place, label in enumerate(labels):
            if any(row["note"].startswith(NOT_SUPPORTED) for row in results[label].values()):
                axes[1].annotate(
                    "llama.cpp: not supported", (1, place), xytext=(4, 6),
                    textcoords="offset points", fontsize=8, color=GREY,
                )  # fmt: skip
        axes[0].set_yticks(range(len(labels)), labels)
        axes[0].set_ylim(len(labels) - 0.5, -0.5)
        save_figure(figure, path)
