"""Results table that a run prints."""

from collections import Counter

from rich.console import Console
from rich.table import Table

from espalier.amounts import count, duration, figure
from espalier.messages.ledger import Traffic
from espalier.results.base_chain import chain_of, title_of
from espalier.results.figures import Size
from espalier.results.run_status import LONGEST_REASON
from server_app.report.summary import COLUMNS, Summary

SPOILT = 0.05
"""Relative difference of mean and median over clients from which the table shows both."""
WIDTH = 160
"""Maximum width of a table in characters; it is narrower if possible."""
LABELS = {
    "local_baseline": "local-baseline (mean)",
    "centralized": "centralized",
    "federated": "federated",
}


def show(summary: Summary, traffic: Traffic) -> None:
    """Print the table of results.

    It has metrics for each text and the task's items, size, sparsity, bytes per client, and time of
    the whole run.
    """
    has_texts = any(metric.name == "perplexity" for metric in summary.metrics())
    titles = ["perplexity"] if has_texts or not summary.scores else []
    titles += [f"scores on {summary.settings.task.name}"] if summary.scores else []
    title = f"{summary.settings.method}: {', '.join(titles)}"
    table = Table(title=title, title_justify="left")
    table.add_column("model")
    bytes_of, time_of = (
        (f", {summary.rounds} rounds", ", whole run") if summary.rounds > 1 else ("", "")
    )
    sparsity = ["sparsity"] if summary.zeroed else []
    after = ["parameters", "on disk", *sparsity, f"bytes per client{bytes_of}", f"time{time_of}"]
    metrics = summary.metrics()
    names = [metric.dataset if metric.name == "perplexity" else metric.name for metric in metrics]
    for name in (*names, *after):
        table.add_column(name, justify="right")
    figures = {
        column: [figure(metric.value(column), metric.digits) for metric in metrics]
        for column in COLUMNS
    }
    # A baseline that was not computed has no values.
    rows = [
        column
        for column in COLUMNS
        if column in ("dense", "federated") or any(shown != "-" for shown in figures[column])
    ]
    for column in rows:
        table.add_row(
            _label(summary, column),
            *figures[column],
            *_size(summary, column),
            *([_sparsity(summary, column)] if sparsity else []),
            *_cost(summary, column, traffic),
            end_section=column == rows[-2] and not summary.chances,
        )
        # A median next to the mean, if a single client distorts it.
        if column == "local_baseline" and (medians := _spoilt(summary)):
            table.add_row("local-baseline (median)", *medians, *["-"] * len(after))
    if summary.chances:
        chances = [figure(metric.others.get("chance"), metric.digits) for metric in metrics]
        table.add_row("chance", *chances, *["-"] * len(after))
    Console(width=WIDTH, color_system=None).print(table)
    _show_notes(summary)


def _label(summary: Summary, column: str) -> str:
    """Return the name of a row; a base that another run made is not called dense."""
    return title_of(chain_of(summary.model)) if column == "dense" else LABELS[column]


def _show_notes(summary: Summary) -> None:
    """Print warnings and notes below the table.

    Sites that sent limited numbers are not named, because numbers of honest clients are sometimes
    limited too.
    """
    for warning in summary.warnings:
        print(f"warning: {warning}")
    for note in summary.notes:
        print(note)
    limited = Counter[str]()
    for seat in summary.roster.seats.values():
        for text in seat.limits_in_words():
            print(f"{seat.site}: {text}")
        limited.update(
            what
            for what, note in seat.capped.items()
            if "claimed" not in note and what != "distance"
        )
    for what, number in limited.items():
        print(
            f"{what}: values of {count(number, 'client')} were limited relative to the median"
            " client (`capped` in summary.json)"
        )
    if cut := summary.tests.get("cut", 0):
        number = summary.tests["number"]
        print(
            f"truncated: {cut} of {count(number, 'test item')}, longer than the model accepts"
            " (written answers also need task.answer-tokens) or task.max-test-tokens allows"
        )


def _size(summary: Summary, column: str) -> tuple[str, str]:
    """Return parameters and bytes on disk."""
    return summary.sizes.get(column, Size()).in_words(summary.sizes.get("dense", Size()).parameters)


def _sparsity(summary: Summary, column: str) -> str:
    """Return the fraction of prunable weights that are zero, as a percentage."""
    sparsities = {
        "local_baseline": summary.local_sparsity,
        "centralized": summary.centralized_sparsity,
        "federated": summary.sparsity,
    }
    value = sparsities.get(column, 0.0)
    return "-" if value is None else f"{value:.2%}"


def _cost(summary: Summary, column: str, traffic: Traffic) -> list[str]:
    """Return bytes per client and the time of the run, which only the federated result has."""
    if column != "federated":
        return ["-", "-"]
    clients = max(1, len(summary.roster.seats))
    return [
        f"{traffic.up / clients:,.0f} up, {traffic.down / clients:,.0f} down",
        duration(summary.seconds, tenths=True),
    ]


def _spoilt(summary: Summary) -> list[str]:
    """Return medians of the local baselines for a row; empty if all are close to the means.

    A large difference shows that a single client distorts the mean.
    """
    metrics = summary.metrics()
    pairs = [
        (metric.value("local_baseline"), metric.medians().get("local_baseline"))
        for metric in metrics
    ]
    far = any(
        mean is not None and middle is not None and abs(mean - middle) > SPOILT * abs(middle)
        for mean, middle in pairs
    )
    if not far:
        return []
    return [
        figure(middle, metric.digits) for metric, (_, middle) in zip(metrics, pairs, strict=True)
    ]


def closing_line(summary: Summary) -> str:
    """Return a line with the number of clients in the result, and the missing ones with reasons."""
    num_clients = summary.settings.num_clients
    roster = summary.roster
    line = f"{roster.finished()} of {count(num_clients, 'client')}"
    for what, names in (
        ("missing", roster.missing(num_clients)),
        ("not evaluated", roster.not_evaluated()),
    ):
        if names:
            line += f"; {what}: " + ", ".join(f"{who} ({_on_one_line(why)})" for who, why in names)
    return line


def _on_one_line(reason: str) -> str:
    words = " ".join(reason.split())
    return words if len(words) <= LONGEST_REASON else f"{words[:LONGEST_REASON]} ..."
