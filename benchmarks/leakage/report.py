"""Table of the figures of all attacks."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.reporting.rows import Row
from espalier.amounts import count
from espalier.storage.atomic import write_bytes

KEYS = ("seed", "message", "seen", "epsilon")
FIGURES = ("members", "others", "auc", "true_positives", "of_two_all", "of_two_quarter", "exposure")
NO_NOISE = "none"


def write_report(rows: Sequence[Row], conditions: Mapping[str, Any], path: Path) -> None:
    """Write ``<path>.md``."""
    write_bytes(path.with_suffix(".md"), "\n".join(_page(rows, conditions)).encode())


def _page(rows: Sequence[Row], conditions: Mapping[str, Any]) -> list[str]:
    seeds = count(len({row["seed"] for row in rows}), "seed")
    lines = [
        "# What replies tell about a client's text",
        "",
        (
            f"Model `{conditions['model']['name']}`; text `{conditions['text']}`;"
            f" {conditions['clients']} clients with {conditions['samples']} samples of"
            f" {conditions['tokens']} tokens each; {conditions['unused']} unused data sets of the"
            f" same size, and {conditions['reference']} for the attacker's reference; mean over"
            f" {seeds}. The attacker knows the model, the settings and all candidate"
            " texts."
        ),
        "",
        "By chance AUC is 0.5, true positives are 1%, and half of the choices of two are right.",
        "",
        (
            "| message | what the attacker sees | epsilon | pairs with members, and without | AUC |"
            " true positives at 1% false positives | which of two data sets, all samples known | a"
            " quarter known |"
        ),
        "|---|---|---|---|---|---|---|---|",
    ]
    measured = [row for row in rows if row["auc"]]
    for key in dict.fromkeys(tuple(row[name] for name in KEYS[1:]) for row in measured):
        own = [row for row in measured if tuple(row[name] for name in KEYS[1:]) == key]
        number = {name: fmean(float(row[name]) for row in own) for name in FIGURES[:-1]}
        lines.append(
            f"| {' | '.join(key)} | {number['members']:.0f}, {number['others']:.0f} |"
            f" {number['auc']:.3f} | {number['true_positives']:.1%} | {number['of_two_all']:.0%} |"
            f" {number['of_two_quarter']:.0%} |"
        )
    return [*lines, "", *_canaries(rows)]


def _canaries(rows: Sequence[Row]) -> list[str]:
    found = [row for row in rows if row["exposure"]]
    if not found:
        return []
    lines = [
        "## Canaries in adapters",
        "",
        (
            "A sentence with nine random digits was in each client's text a number of times."
            " Exposure in bits: log2 of the number of possible sentences minus log2 of the canary's"
            " rank among them, mean over clients."
        ),
        "",
        "| canary | what the attacker sees | exposure |",
        "|---|---|---|",
    ]
    for key in dict.fromkeys(_canary(row) for row in found):
        own = [float(row["exposure"]) for row in found if _canary(row) == key]
        lines.append(f"| {key[0]} | {key[1]} | {fmean(own):.1f} |")
    return [*lines, ""]


def _canary(row: Row) -> tuple[str, str]:
    """Return the first two cells of a canary's row."""
    noise = "" if row["epsilon"] == NO_NOISE else f", epsilon {row['epsilon']}"
    return row["message"] + noise, row["seen"]
