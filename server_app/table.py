"""The table that a run prints."""

from rich.console import Console
from rich.table import Table

from espalier.amounts import count
from espalier.wire.ledger import Traffic
from server_app.figures import figure
from server_app.results import COLUMNS, Summary

SPOILT = 0.05
"""Share by which a mean over clients is off their median when the table shows both."""
LONGEST_REASON = 300
"""Characters; ``summary.json`` has all of it."""
LABELS = {"dense": "dense", "local_only": "local-only (mean)", "centralized": "centralized", "federated": "federated"}


def show(summary: Summary, traffic: Traffic) -> None:
    """Print perplexity per text, scores on the task's items, sparsity, bytes per client and seconds of the whole run."""
    scored = f", scores on {summary.settings.task.name}" if summary.scores else ""
    table = Table(title=f"{summary.settings.method}: perplexity{scored}", title_justify="left")
    table.add_column("model")
    for text in summary.texts():
        table.add_column(text, justify="right")
    for metric in summary.scores:
        table.add_column(metric, justify="right")
    prunes = summary.sparsity is not None
    bytes_of, seconds_of = (f", {summary.rounds} rounds", ", whole run") if summary.rounds > 1 else ("", "")
    for name in (*(["sparsity"] if prunes else []), f"bytes per client{bytes_of}", f"seconds{seconds_of}"):
        table.add_column(name, justify="right")
    clients = max(1, len(summary.roster.seats))
    for column in COLUMNS:
        figures = [figure(summary.perplexity(text, column)) for text in summary.texts()]
        figures += [figure(summary.score(metric, column), 3) for metric in summary.scores]
        federated = column == "federated"
        shares = {
            "local_only": summary.local_sparsity,
            "centralized": summary.centralized_sparsity,
            "federated": summary.sparsity,
        }
        sparsity = shares.get(column, 0.0)
        table.add_row(
            LABELS[column],
            *figures,
            *([_share(sparsity) if any(figure != "-" for figure in figures) else "-"] if prunes else []),
            f"{traffic.up / clients:,.0f} up, {traffic.down / clients:,.0f} down" if federated else "-",
            f"{summary.seconds:.1f}" if federated else "-",
            end_section=column == "centralized" and not summary.chances,
        )
        if column == "local_only" and (medians := _spoilt(summary)):
            table.add_row("local-only (median)", *medians, *["-"] * (3 if prunes else 2))
    if summary.chances:
        chances = [figure(summary.chances[metric], 3) for metric in summary.scores]
        table.add_row("chance", *["-"] * len(summary.texts()), *chances, *["-"] * (3 if prunes else 2))
    Console(width=110, color_system=None).print(table)
    for note in summary.notes:
        print(note)
    for seat in summary.roster.seats.values():
        for what, claim in seat.capped.items():
            print(f"{seat.site}: its {what} {claim['claimed']:g} counted as {claim['counted']:g}")
    if cut := summary.tests.get("cut", 0):
        number = summary.tests["number"]
        print(
            f"cut: {cut} of {count(number, 'test item')}, longer than the model takes (written answers need task.answer-tokens "
            "of it) or task.max-test-tokens allows"
        )


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2%}"


def _spoilt(summary: Summary) -> list[str]:
    """Medians of the local-only results as figures of a row, if a mean is far from one: then a client spoils it."""
    texts = [(summary.perplexity(text, "local_only"), summary.median_perplexities(text)) for text in summary.texts()]
    scores = [(summary.score(metric, "local_only"), summary.median_scores(metric)) for metric in summary.scores]
    found = [(mean, medians.get("local_only")) for mean, medians in texts + scores]
    far = any(mean is not None and middle is not None and abs(mean - middle) > SPOILT * abs(middle) for mean, middle in found)
    digits = [2] * len(texts) + [3] * len(scores)
    return [figure(middle, number) for (_, middle), number in zip(found, digits, strict=True)] if far else []


def closing_line(summary: Summary) -> str:
    """How many of the clients that were asked for are in the result, and who is not, with the reason."""
    asked, roster = summary.settings.num_clients, summary.roster
    line = f"{roster.finished()} of {count(asked, 'client')}"
    for what, names in (("missing", roster.missing(asked)), ("not evaluated", roster.not_evaluated())):
        if names:
            line += f"; {what}: " + ", ".join(f"{who} ({_on_one_line(why)})" for who, why in names)
    return line


def _on_one_line(reason: str) -> str:
    words = " ".join(reason.split())
    return words if len(words) <= LONGEST_REASON else f"{words[:LONGEST_REASON]} ..."
