"""The table that a run prints."""

from rich.console import Console
from rich.table import Table

from espalier.wire.ledger import Traffic
from server_app.results import COLUMNS, Summary

LABELS = {"dense": "dense", "local_only": "local-only (mean)", "centralized": "centralized", "federated": "federated"}


def show(summary: Summary, traffic: Traffic) -> None:
    """Print perplexity per text, scores on the task's items, sparsity, bytes per client and seconds."""
    scored = f", scores on {summary.settings.task.name}" if summary.scores else ""
    table = Table(title=f"{summary.settings.method}: perplexity{scored}", title_justify="left")
    table.add_column("model")
    for text in summary.texts():
        table.add_column(text, justify="right")
    for metric in summary.scores:
        table.add_column(metric, justify="right")
    prunes = summary.sparsity is not None
    for name in (*(["sparsity"] if prunes else []), "bytes per client", "seconds"):
        table.add_column(name, justify="right")
    clients = max(1, len(summary.roster.seats))
    for column in COLUMNS:
        figures = [_figure(summary.perplexity(text, column)) for text in summary.texts()]
        figures += [_figure(summary.score(metric, column), 3) for metric in summary.scores]
        federated = column == "federated"
        shares = {
            "local_only": summary.local_sparsity,
            "centralized": summary.centralized_sparsity,
            "federated": summary.sparsity,
        }
        sparsity = shares.get(column) or 0.0
        table.add_row(
            LABELS[column],
            *figures,
            *([f"{sparsity:.2%}" if any(figure != "-" for figure in figures) else "-"] if prunes else []),
            f"{traffic.up / clients:,.0f} up, {traffic.down / clients:,.0f} down" if federated else "-",
            f"{summary.seconds:.1f}" if federated else "-",
            end_section=column == "centralized" and not summary.chances,
        )
    if summary.chances:
        chances = [_figure(summary.chances[metric], 3) for metric in summary.scores]
        table.add_row("chance", *["-"] * len(summary.texts()), *chances, *["-"] * (3 if prunes else 2))
    Console(width=110, color_system=None).print(table)


def _figure(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
