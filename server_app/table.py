"""The table that a run prints."""

from rich.console import Console
from rich.table import Table

from espalier.wire.ledger import Traffic
from server_app.results import COLUMNS, Summary

LABELS = {"dense": "dense", "local_only": "local-only (mean)", "centralized": "centralized", "federated": "federated"}


def show(summary: Summary, traffic: Traffic) -> None:
    """Print perplexity per text, sparsity, bytes per client and seconds."""
    table = Table(title=f"{summary.settings.method}: perplexity", title_justify="left")
    table.add_column("model")
    for text in summary.texts():
        table.add_column(text, justify="right")
    for name in ("sparsity", "bytes per client", "seconds"):
        table.add_column(name, justify="right")
    clients = max(1, len(summary.roster.seats))
    for column in COLUMNS:
        figures = [_figure(summary.perplexity(text, column)) for text in summary.texts()]
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
            f"{sparsity:.2%}" if any(figure != "-" for figure in figures) else "-",
            f"{traffic.up / clients:,.0f} up, {traffic.down / clients:,.0f} down" if federated else "-",
            f"{summary.seconds:.1f}" if federated else "-",
            end_section=column == "centralized",
        )
    Console(width=110, color_system=None).print(table)


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
