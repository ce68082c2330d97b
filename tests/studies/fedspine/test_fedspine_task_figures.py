"""Figures of the study of FedSpine on a task: times at which a score is reached."""

from pathlib import Path

import pytest

from benchmarks.fedspine.tasks import report as task_report
from benchmarks.fedspine.tasks import runs
from benchmarks.fedspine.tasks.compared_methods import AT_ONCE_LAST
from benchmarks.fedspine.tasks.fleets_and_alphas import by_alpha, by_fleet, times_by_alpha
from benchmarks.fedspine.tasks.other_fleet import retimed
from benchmarks.fedspine.tasks.results import Found, found_in
from benchmarks.reporting.rows import Rows
from espalier.settings.tables.fleet import Fleet
from strategies.fleet import fleet_of


def test_fleet_times_follow_operations_and_bytes() -> None:
    """Device 0 computes 6e11 operations and sends 2 MB in each of two rounds.

    Device 1 does 10% of that in the first round only.
    """
    done = {(0, 1): (6e11, 2_000_000), (0, 2): (6e11, 2_000_000), (1, 1): (6e10, 200_000)}
    low = fleet_of("low")
    high = fleet_of("high")
    assert low is not None
    assert high is not None

    def seconds(fleet: Fleet, client: int, server_round: int) -> float:
        drawn, (operations, num_bytes) = (
            fleet.drawn(7, client, server_round),
            done[client, server_round],
        )
        return operations / drawn.operations_per_second + 8 * num_bytes / drawn.bits_per_second

    clients = [
        {
            "client": client,
            "rounds": [
                {
                    "round": at,
                    "virtual_seconds": seconds(high, client, at),
                    "bytes": done[client, at][1],
                }
                for at in (1, 2)
                if (client, at) in done
            ],
        }
        for client in (0, 1)
    ]
    first, second = retimed({"seed": 7, "clients": clients}, high, low)
    times = [seconds(low, 0, 1), seconds(low, 1, 1)]
    assert [own.seconds for own in first.devices.values()] == pytest.approx(times)
    assert (first.seconds, first.waiting_seconds) == pytest.approx(
        (times[0], (times[0] - times[1]) / 2)
    )
    assert (second.round, second.seconds, second.waiting_seconds) == (
        2,
        pytest.approx(seconds(low, 0, 2)),
        0,
    )


def test_late_cut_counts_with_its_rounds(tmp_path: Path) -> None:
    conditions = {"settings": {"federation.rounds": 10}}
    rows = Rows(tmp_path / "fedspine-sst2.csv", runs.KEYS, runs.FIGURES, conditions)
    curves = Rows(
        tmp_path / "fedspine-sst2-curves.csv", runs.CURVE_KEYS, runs.CURVE_FIGURES, conditions
    )
    for model, seconds, score in (("bandits", 40.0, 0.7), (AT_ONCE_LAST, 60.0, 0.8)):
        key = {"seed": 0, "fleet": "high", "share": 0.5, "model": model}
        rows.add(key, **dict.fromkeys(runs.FIGURES, 0.0) | {"seconds": seconds, "score": score})
        if model == "bandits":
            curves.add({**key, "round": 6}, seconds=30.0, score=0.7, worst=0.6)
    found = found_in(runs.Files(rows, curves), "acc")
    assert found.targets("high", "0.5") == {"0": 0.7}
    assert [found.seconds_to("high", "0.5", model) for model in ("bandits", AT_ONCE_LAST)] == [
        {"0": 30.0},
        {"0": 60.0},
    ]


def test_seconds_tell_how_many_seeds_got_there(tmp_path: Path) -> None:
    """Only bandits reach the score with all seeds; HetLoRA does with one of two.

    FedPETuning does with its only one.
    """
    points = [
        ("0", "0.5", "bandits", 20, 0.7), ("1", "0.5", "bandits", 30, 0.6),
        ("2", "0.5", "bandits", 30, 0.6), ("0", "0.0", "HetLoRA", 10, 0.8),
        ("1", "0.0", "HetLoRA", 9, 0.5), ("0", "0.0", "FedPETuning", 40, 0.9),
    ]  # fmt: skip
    names = ("seed", "fleet", "share", "model", "seconds", "score")
    curves = [
        dict(zip(names, map(str, (seed, "high", *rest)), strict=True), round="1")
        for seed, *rest in points
    ]
    rows = [{**dict.fromkeys(task_report.COLUMNS, "0"), **row} for row in curves]
    conditions = {
        "items": 9,
        "model": {"name": "encoder", "parameters": 7},
        "settings": {"data.alpha": 10.0},
    }
    task_report.write_report(
        "SST-2", Found(rows, curves, "acc"), conditions, tmp_path / "fedspine-sst2"
    )
    lines = [
        line.split(" | ")
        for line in (tmp_path / "fedspine-sst2.md").read_text().splitlines()
        if line.startswith("| ")
    ]
    last = {
        line[0].removeprefix("| "): line[-1].removesuffix(" |") for line in lines if len(line) > 5
    }
    assert (last["bandits"], last["HetLoRA"], last["FedPETuning"]) == ("26.7", "10 (1 of 2)", "40")


def test_target_is_a_score_that_all_methods_reach() -> None:
    """Bandits reach at most 0.7 and FedPETuning 0.8, so the target is 0.7, after 15 and 30 seconds.

    Arms with more steps do not count.
    """
    points = [
        ("0.0", "FedPETuning", 30, 0.7), ("0.0", "FedPETuning", 60, 0.8),
        ("0.5", "bandits", 8, 0.6), ("0.5", "bandits", 15, 0.7),
        ("0.5", "bandits, 20 steps", 9, 0.5), ("0.5", "bandits, 20 steps", 18, 0.72),
        ("0.5", "schedule, rank 4", 9, 0.2),
    ]  # fmt: skip
    rows = [
        {
            "seed": "0",
            "fleet": "high",
            "share": share,
            "model": model,
            "seconds": str(seconds),
            "score": str(score),
        }
        for share, model, seconds, score in points
    ]
    found = Found(rows, rows, "acc")
    assert found.groups() == [("high", "0.5")]
    assert found.targets("high", "0.5") == {"0": 0.7}
    names = ("FedPETuning", "bandits", "bandits, 20 steps", "schedule, rank 4")
    assert [found.seconds_to("high", "0.5", name) for name in names] == [
        {"0": 30},
        {"0": 15},
        {"0": 18},
        {},
    ]
    losses = [{**row, "score": str(1 - float(row["score"]))} for row in rows]
    assert Found(losses, losses, "loss").seconds_to("high", "0.5", "bandits") == {"0": 15}


def test_bars_of_fleets_and_alphas() -> None:
    """Both methods reach at most 0.7 with one of the fleets, so bars show the first rounds at 0.7.

    HetLoRA ran with only one fleet.
    """
    points = [
        ("low", "0.0", "FedPETuning", 3, 0.7), ("low", "0.5", "bandits", 2, 0.6),
        ("low", "0.5", "bandits", 4, 0.8), ("high", "0.0", "FedPETuning", 9, 0.7),
        ("high", "0.5", "bandits", 5, 0.7), ("high", "0.0", "HetLoRA", 1, 0.1),
    ]  # fmt: skip
    names = ("fleet", "share", "model", "seconds", "score")
    curves = [dict(zip(names, map(str, point), strict=True), seed="0") for point in points]
    assert by_fleet(curves, curves, "0.5", of_loss=False) == {
        "low": {"FedPETuning": 3, "bandits": 4},
        "high": {"FedPETuning": 9, "bandits": 5},
    }
    assert by_fleet(curves, curves[:2], "0.5", of_loss=False) == {}
    ends = [
        ("0.5", "bandits", "0.8"),
        ("0.5", "bandits, alpha 0.1", "0.5"),
        ("0.0", "FedPETuning", "0.9"),
    ]
    rows = [
        {"seed": "0", "fleet": "high", "share": share, "model": name, "score": score}
        for share, name, score in ends
    ]
    assert by_alpha(rows, "high", "0.5", 10.0) == {
        "alpha 10": {"bandits": 0.8},
        "alpha 0.1": {"bandits": 0.5},
    }
    assert by_alpha(rows[:1], "high", "0.5", 10.0) == {}
    points = [
        ("0.5", "bandits", 2, 0.6), ("0.5", "bandits", 4, 0.8), ("0.0", "FedPETuning", 7, 0.7),
        ("0.0", "HetLoRA", 1, 0.1), ("0.5", "bandits, alpha 0.1", 3, 0.5),
        ("0.0", "FedPETuning, alpha 0.1", 5, 0.6),
    ]  # fmt: skip
    curves = [
        dict(zip(names[1:], map(str, point), strict=True), seed="0", fleet="high")
        for point in points
    ]
    assert times_by_alpha(curves, "high", "0.5", 10.0, of_loss=False) == {
        "alpha 10\n(to 0.7)": {"bandits": 4, "FedPETuning": 7},
        "alpha 0.1\n(to 0.5)": {"bandits": 3, "FedPETuning": 5},
    }
