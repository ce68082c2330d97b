"""Bytes of a run by kind of message, and its estimate next to what was measured."""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from espalier.amounts import duration, size
from espalier.results.finished_run import FinishedRun

KINDS = {
    "enrol": "enrolment: who a site is",
    "train": "the work of a round, or its first part",
    "fetch": "further parts of a large reply",
    "shares": "secure sums: keys of all sites, and encrypted shares of secrets",
    "masked": "secure sums: masked tensors",
    "confirm": "secure sums: confirmations of who is in the sum",
    "unmask": "secure sums: shares that unmask the sum",
    "push": "what the server pushes to clients",
    "local_baseline": "local baseline",
    "evaluate": "evaluation by the clients",
    "refused": "refused messages",
}
"""Meaning of each kind of message."""


@dataclass
class Kind:
    """Messages of one kind."""

    name: str
    up: int = 0
    """Bytes that clients sent."""
    down: int = 0
    """Bytes that the server sent."""
    messages: int = 0

    @property
    def meaning(self) -> str:
        """Meaning of the kind in words."""
        return KINDS.get(self.name, "")


@dataclass(frozen=True)
class Estimated:
    """Row of the table of estimates."""

    what: str
    estimate: str
    measured: str
    ratio: float | None = None
    """Measured value divided by the estimate; None if one is unknown."""
    note: str = ""


def traffic_of(run: FinishedRun) -> list[Kind]:
    """Return the bytes of a run by kind of message, from its ledger.

    Headers of the network are not counted.
    """
    kinds: dict[str, Kind] = {}
    for entry in run.json_lines("ledger.jsonl"):
        direction = entry["direction"]
        # Entries with the times of a simulated fleet have no direction.
        if direction is None:
            continue
        kind = kinds.setdefault(entry["kind"], Kind(entry["kind"]))
        setattr(kind, direction, getattr(kind, direction) + entry["wire_bytes"])
        # A message has one entry without a block, for its header and fields.
        kind.messages += entry["block"] is None
    order = {name: number for number, name in enumerate(KINDS)}
    return sorted(kinds.values(), key=lambda kind: order.get(kind.name, len(order)))


def estimates_of(run: FinishedRun) -> list[Estimated]:
    """Return the estimate of a run next to what was measured; empty if none was recorded."""
    plan = run.json("plan.json")
    if not plan:
        return []
    summary = run.summary
    # Until a run ends, its summary has no bytes.
    ended = summary.get("finished") is not None
    rows = [
        _bytes_row(f"bytes {direction}", plan, key, summary[key] if ended else None)
        for direction, key in (("up", "bytes_up"), ("down", "bytes_down"))
    ]
    measured = plan.get("measured", {})
    client = measured.get("client_memory")
    rows += [
        _row(
            "memory of the server, at its peak",
            plan["server_memory"],
            measured.get("server_memory"),
        ),
        _row(
            "memory of a client, at its peak", plan["client_memory"], client, unknown="stays there"
        ),
        _row(
            "run directory",
            plan["server_disk"],
            _on_disk(run) if ended else None,
            unknown="" if ended else "the run has not ended",
        ),
    ]
    seconds = plan["seconds"]
    taken = _seconds_of_a_round(run)
    speed = "measured on this machine" if seconds["measured"] else "assumed"
    estimate = seconds["round_of_a_client"]
    rows.append(
        Estimated(
            "round of a client",
            duration(estimate, tenths=True),
            "not recorded" if taken is None else duration(taken, tenths=True),
            taken / estimate if taken is not None and estimate else None,
            f"at {seconds['teraflops']:.3g} teraflops ({speed}); the estimate is without reading of"
            " text",
        )
    )
    return rows


def _bytes_row(what: str, plan: Mapping[str, Any], key: str, measured: int | None) -> Estimated:
    return _row(what, plan[key], measured, plan[f"least_{key}"])


def _row(
    what: str,
    estimate: int,
    measured: int | None,
    least: int | None = None,
    unknown: str = "not recorded",
) -> Estimated:
    """Return a row; ``least`` is the minimum if the estimate is a range."""
    shown = unknown if measured is None else size(measured)
    ratio = measured / estimate if measured is not None and estimate else None
    beginning = "" if least in (None, estimate) else f"{size(least)} to "
    return Estimated(what, f"{beginning}{size(estimate)}", shown, ratio)


def _on_disk(run: FinishedRun) -> int:
    """Return the bytes of all files in the run directory, without the report itself."""
    files = (file for file in run.path.rglob("*") if file.is_file() and file.suffix != ".html")
    return sum(file.stat().st_size for file in files)


def _seconds_of_a_round(run: FinishedRun) -> float | None:
    """Return the mean seconds of a client's round; None if no client worked."""
    worked = run.json("seconds.json").get("clients", {}).values()
    means = [seconds / rounds for seconds, rounds in worked if rounds]
    return fmean(means) if means else None
