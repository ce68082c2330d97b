"""The report as one HTML page: texts of a run are escaped, and nothing is loaded from elsewhere."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import tomli_w
from jinja2 import DictLoader, Environment, StrictUndefined
from markupsafe import Markup

from espalier.amounts import count, duration, size
from espalier.errors import InputError
from espalier.identity.names import without_control
from espalier.results.figures import DENSE, FEDERATED, Size, size_of
from espalier.results.finished_run import CLIENTS, FinishedRun
from espalier.results.report import figures
from espalier.results.report.comparison import (
    Comparison,
    comparisons_of,
    first_run,
    measure_title,
    names_of,
)
from espalier.results.report.egress import site_logs
from espalier.results.report.layers import Layers, layers_of
from espalier.results.report.page_style import STYLE
from espalier.results.report.page_template import PAGE
from espalier.results.report.rounds import curves_of
from espalier.results.report.run_settings import changed_settings
from espalier.results.report.traffic import estimates_of, traffic_of
from espalier.results.report.usage import snippets_of
from espalier.results.report.verdict import verdict
from espalier.results.run_status import SUMMARY, run_status
from espalier.results.speed import measured_rows
from espalier.results.use.scores import stored_rows
from espalier.settings.registry import METHODS
from espalier.storage.atomic import write_bytes

NEEDED = {
    "bytes_down", "bytes_up", "clients", "device", "method", "metrics", "num_clients", "reason",
    "report", "seconds", "seed", "test_items", "threads",
}  # fmt: skip
"""Keys of ``summary.json`` that a report cannot do without; every run of this version has them."""
NEEDED_OF_CLIENT = {
    "bytes_down", "bytes_up", "capped", "metrics", "reason", "seconds", "site", "status",
}  # fmt: skip
"""Keys of each client in it."""
FILE = "report.html"
SHORT_HASH = 12
"""Number of digits of a commit that the report shows."""
SECTIONS = {
    "verdict": "Verdict",
    "quality": "Quality",
    "tasks": "Public tasks",
    "size": "Size and speed",
    "rounds": "Rounds",
    "clients": "Clients",
    "bytes": "Bytes",
    "estimate": "Estimate",
    "layers": "Layers",
    "egress": "What left the sites",
    "use": "Use the result",
    "settings": "Settings",
}


def write_report(run: FinishedRun, path: Path) -> None:
    """Write the report of a run as one file.

    Raises InputError if a file of the run is damaged, or ``path`` cannot be written.
    """
    write_bytes(path, report_page(run).encode())


def report_page(run: FinishedRun) -> str:
    """Return the report of a run as the text of an HTML page; InputError for a damaged file."""
    _require_complete(run)
    environment = Environment(
        loader=DictLoader({FILE: PAGE}),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        finalize=_printable,
    )
    environment.filters |= {
        "brief": _brief,
        "count": count,
        "duration": partial(duration, tenths=True),
        "number": lambda value, digits: f"{value:,.{digits}f}",
        "percent": lambda value: f"{value:.1%}",
        "quoted": lambda path: shlex.quote(str(path)),
        "size": size,
    }
    return environment.get_template(FILE).render(_content(run))


def _require_complete(run: FinishedRun) -> None:
    """Raise InputError if the summary lacks something that a report shows."""
    lacking = sorted(NEEDED - run.summary.keys())
    clients = run.summary.get("clients") or []
    missing = {key for client in clients for key in NEEDED_OF_CLIENT - client.keys()}
    lacking += [f"{key} of a client" for key in sorted(missing)]
    if lacking:
        raise InputError(
            f"{run.path / SUMMARY}: lacks {', '.join(lacking)}: another version wrote it, or it was"
            " changed; write the report with that version, or restore the file from a backup"
        )


def _printable(value: Any) -> Any:
    """Return a value with question marks for control characters, which a site may have sent."""
    return without_control(value) if type(value) is str else value


def _brief(value: Any) -> str:
    """Return a number with four digits, or another value as text."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _content(run: FinishedRun) -> dict[str, Any]:
    """Return the values of the template."""
    summary = run.summary
    comparisons = comparisons_of(run)
    traffic = traffic_of(run)
    layers = layers_of(run)
    clients = summary.get("clients") or []
    method = str(summary["method"])
    # The title of a method ends with an explanation in parentheses.
    name, _, what = METHODS[method].title.partition(" (") if method in METHODS else (method, "", "")
    present = {column for one in comparisons for column in one.values}
    has_result = bool(run.model or run.adapter or run.client_models)
    content = {
        "run": run,
        "summary": summary,
        "base_name": _base_name(run),
        "title": name,
        "subtitle": what.removesuffix(")"),
        "missing": _missing(summary),
        "intervals": _intervals(comparisons),
        "has_chance": any(one.quality.chance is not None for one in comparisons),
        "status": run_status(run.path)[0],
        "verdict": verdict(run, comparisons),
        "columns": {column: name for column, name in names_of(run).items() if column in present},
        "names": names_of(run),
        "comparisons": comparisons,
        "by_round": method in METHODS and METHODS[method].measured_by_round,
        "task_rows": (task_rows := stored_rows(run)),
        "task_models": list(dict.fromkeys(name for row in task_rows for name in row.values)),
        # Sizes of baselines are shown only if their quality is.
        "sizes": [row for row in _sizes(run) if row[0] in present | {"original", DENSE, FEDERATED}],
        "has_result": has_result,
        "files_gone": not has_result and bool(size_of(run, FEDERATED).folder),
        "measurements": measured_rows(run),
        "clients": clients,
        "client_measures": _measures_of(clients),
        "traffic": traffic,
        "estimates": estimates_of(run),
        "layers": layers,
        "logs": site_logs(run),
        "snippets": snippets_of(run),
        "changed": changed_settings(run),
        "settings": tomli_w.dumps(run.settings),
        "style": Markup(STYLE),
        "figures": _figures(run, comparisons, traffic, layers),
    }
    return content | {"sections": list(_sections(content))}


def _intervals(comparisons: Sequence[Comparison]) -> dict[str, bool]:
    """Return whether values have intervals that come from clients, and from items."""
    with_interval = [own for one in comparisons for own in one.values.values() if own.interval]
    return {
        "of_clients": any(own.clients for own in with_interval),
        "of_items": any(not own.clients for own in with_interval),
    }


def _missing(summary: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the sites that are not in the result, by reason."""
    found: dict[str, list[str]] = {}
    for one in summary.get("missing") or ():
        found.setdefault(str(one["reason"]), []).append(str(one["site"]))
    return found


def _base_name(run: FinishedRun) -> str:
    """Return the name of the base model, with its commit if it comes from the hub."""
    name = str(run.setting("model"))
    revision = run.summary.get("model_revision")
    return f"{name} at {revision[:SHORT_HASH]}" if revision else name


def _sections(content: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield id and name of the sections that the page has."""
    present = {
        "quality": content["comparisons"],
        "tasks": content["task_rows"],
        "size": content["sizes"] or content["measurements"],
        "rounds": content["figures"]["rounds"],
        "clients": content["clients"],
        "bytes": content["traffic"],
        "estimate": content["estimates"],
        "layers": content["layers"].maps or content["layers"].notes,
    }
    for name, title in SECTIONS.items():
        if present.get(name, True):
            yield name, title


def _figures(
    run: FinishedRun, comparisons: Sequence[Comparison], kinds: Sequence[Any], layers: Layers
) -> dict[str, Any]:
    """Return the figures; their texts are escaped by the library that draws them."""
    sites = {int(one["client"]): str(one["site"]) for one in run.summary.get("clients") or ()}
    drawn = [one for one in comparisons if one.is_drawable]
    by_client = [one for one in drawn if any(len(own.clients) > 1 for own in one.values.values())]
    curves = curves_of(run)
    # A figure of one value would show no more than the table.
    several = [one for one in drawn if len(one.values) > 1]
    dense = {one.title: one.values["dense"].value for one in comparisons if "dense" in one.values}
    single = {
        "models": figures.draw_comparison(several) if several else "",
        "rounds": figures.draw_rounds(curves, dense) if curves else "",
        "bytes": figures.draw_bytes(kinds) if kinds else "",
    }
    shown: dict[str, Any] = {name: Markup(svg) for name, svg in single.items()}
    shown["clients"] = [Markup(figures.draw_clients(one, sites)) for one in by_client]
    shown["layers"] = [
        Markup(figures.draw_heat_map(one, number)) for number, one in enumerate(layers.maps)
    ]
    return shown


def _measures_of(clients: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return keys and names of the clients' own numbers, in the order of their first use."""
    return {key: measure_title(key) for client in clients for key in client["metrics"]}


def _sizes(run: FinishedRun) -> Iterator[tuple[str, str, Size, float | None]]:
    """Yield column, name, size, and the ratio of its parameters to those of the base.

    The ratio is None for an adapter, which is used together with its base.
    """
    base = size_of(run, DENSE)
    first = first_run(run)
    for column, name in names_of(run).items():
        source, entry = (first, DENSE) if column == "original" else (run, column)
        model = Size() if source is None else size_of(source, entry)
        if model.parameters is None or base.parameters is None:
            continue
        what = "adapter" if model.is_adapter else name
        if model.folder == CLIENTS:
            what += " (mean of the clients' models)"
        yield column, what, model, None if model.is_adapter else model.parameters / base.parameters
