"""Study of the cost of a step: its cells, the measured ones, and its tables."""

import argparse
import json
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from benchmarks.fedspine import steps
from benchmarks.models import random_llama, random_roberta
from espalier.errors import EspalierError


def given(folder: Path, *words: str) -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser()
    steps.add_arguments(parser)
    return parser.parse_args(["--out", str(folder), "--repeats", "2", *words])


def figures(cell: str) -> dict[str, float]:
    """Return figures of a measured cell, with as many seconds as its name has letters."""
    return {
        "seconds": float(len(cell)),
        "peak_mib": 100.0 + len(cell),
        "trained": 1e6,
        "sent_mib": 4.0,
        "gone": 0.125,
    }


def test_only_named_cells_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = list[str]()
    calls = count()

    def measure(given: argparse.Namespace, cell: str) -> dict[str, float]:
        measured.append(cell)
        return figures(cell) | {"seconds": figures(cell)["seconds"] + next(calls)}

    monkeypatch.setattr(steps, "_in_a_fresh_process", measure)
    monkeypatch.setattr(steps, "save_model", lambda folder, shape: None)
    words = ["--only", "by masks", "all weights"]
    with pytest.raises(
        EspalierError,
        match=r"--only by masks all weights: .*fedspine-steps-0.1b.json has not all other rows",
    ):
        steps.work(given(tmp_path, *words))
    steps.work(given(tmp_path))
    assert measured == [*steps.cells(), *steps.cells()]
    before = json.loads((tmp_path / "fedspine-steps-0.1b.json").read_text())["rows"]
    measured.clear()
    steps.work(given(tmp_path, *words))
    named = [cell for cell in steps.cells() if "by masks" in cell or cell == "all weights"]
    assert measured == [*named, *named]
    after = json.loads((tmp_path / "fedspine-steps-0.1b.json").read_text())["rows"]
    assert {cell for cell in after if after[cell] != before[cell]} == set(named)
    page = (tmp_path / "fedspine-steps-0.1b.md").read_text()
    first = "p = 0%, r = 8, measuring units"
    last = "p = 50%, r = 8, measuring units"
    times = f"{before[first]['seconds']:.2f}, {before[last]['seconds']:.2f}"
    memory = f"{100 + len(first)}, {100 + len(last)}"
    use = before["p = 50%, a forward pass"]["seconds"]
    assert (
        f"| FedSpine | {times} | {memory} | {use:.3f} | {100 + len('p = 50%, a forward pass')} |"
        in page
    )
    assert (tmp_path / "fedspine-steps-0.1b.png").exists()


def llama(folder: Path) -> int:
    """Save a tiny model; return the number of its trained head parameters, 0."""
    random_llama.save_model(
        folder, random_llama.Shape(hidden=32, feed_forward=64, blocks=2, heads=4, kv_heads=4)
    )
    return 0


def roberta(folder: Path) -> int:
    """Save a tiny encoder; return the number of parameters of its head for two classes."""
    random_roberta.save_model(
        folder, random_roberta.Shape(30000, hidden=32, feed_forward=64, blocks=2, heads=4)
    )
    return 32 * 32 + 32 + 2 * 32 + 2


@pytest.mark.parametrize("save", [llama, roberta])
def test_unit_measures_take_steps_of_cut_models(
    save: Callable[[Path], int], tmp_path: Path
) -> None:
    """The number of trained parameters falls with the pruning ratio and grows with the rank.

    The model is tiny and is measured in this process.
    """
    head = save(tmp_path)
    own = given(
        tmp_path,
        "--model",
        str(tmp_path),
        "--batch",
        "1",
        "--tokens",
        "8",
        "--steps",
        "1",
        "--threads",
        "1",
    )
    names = (
        "p = 0%, r = 2",
        "p = 0%, r = 8",
        "p = 50%, r = 8",
        "p = 50%, r = 8, measuring units by masks",
        "all weights",
    )
    found = {cell: steps.measure(own, cell) for cell in names}
    trained = {cell: figures["trained"] - head for cell, figures in found.items()}
    assert steps.measure(own, "p = 50%, a forward pass")["gone"] == 0.5
    assert {cell: figures["gone"] for cell, figures in found.items()} == {
        cell: 0.5 * ("50%" in cell) for cell in names
    }
    assert trained["p = 0%, r = 8"] == 4 * trained["p = 0%, r = 2"] > trained["p = 50%, r = 8"]
    assert (
        trained["p = 50%, r = 8"]
        == trained["p = 50%, r = 8, measuring units by masks"]
        < trained["all weights"]
    )
