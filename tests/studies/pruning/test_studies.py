"""Studies give the app's figures, resume after a stop, and report what they measured."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.studies import measure as measuring
from benchmarks.studies.cells import STUDIES, Cell, Setting
from benchmarks.studies.clients import Clients
from benchmarks.studies.measure import Bench, measure
from benchmarks.studies.report import write_report
from benchmarks.studies.rows import Row, Rows
from espalier.data.public_text import public_samples
from espalier.errors import EspalierError
from espalier.hf.machine.computing import set_up
from espalier.hf.opening.opened_model import open_model
from espalier.hf.stream.block_stream import BlockStream
from espalier.settings.run import parse
from tests.bench import EVALUATED, private_text, summary
from tests.bench import Bench as Federation
from tests.in_process import InProcessGrid

PUBLIC: dict[str, Any] = {"texts": {"public": {"samples": 2, "sha256": "0"}}}
CONDITIONS: dict[str, Any] = {
    "model": {"name": "tiny", "weights": 10, "sha256": "0"},
    "texts": {"wiki": {"samples": 2, "sha256": "0"}, "c4": {"samples": 2, "sha256": "0"}},
    "sequence_length": 16,
    "ties": "magnitude",
}
SETTING = Setting(seed=3, clients=4, samples=2, sparsity=0.5, local_group="row")
FILE = 5e-6
"""Largest relative difference between a number and what its row has."""


@pytest.fixture
def sites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Federation:
    """Tiny model and one text that is dealt out to four clients."""
    monkeypatch.setenv("ESPALIER_STATE_DIR", str(tmp_path / "state"))
    shared = tmp_path / "shared.txt"
    settings = EVALUATED | {
        "data.source": "files",
        "data.path": str(shared),
        "seed": SETTING.seed,
        "evaluation.own-text": False,
    }
    made = Federation(tmp_path, "fedprllm", settings)
    shared.write_text("\n\n".join(private_text(client) for client in range(4)))
    return made


def studied(sites: Federation) -> Bench:
    settings = parse(sites.config())
    model = open_model(settings.model)
    return Bench(
        BlockStream(model, set_up(settings, sites.folder)),
        public_samples(settings.evaluation, model.encode),
        sites.config(),
    )


def app_figures(sites: Federation, **changes: Any) -> dict[str, Any]:
    """Return the app's own figures for these settings; its nodes have only the text of the run."""
    from client_app.app import app

    nodes = [{"partition-id": client, "num-partitions": 4} for client in range(4)]
    folder = sites.run(InProcessGrid(app, nodes, sites.config(**changes)), **changes)
    document = summary(folder)
    return {**document["metrics"][0]["values"], "sparsity": document["sparsity"]["achieved"]}


def test_a_cell_is_what_the_app_gives(sites: Federation, tmp_path: Path) -> None:
    """Rows have six significant digits."""
    cells = [Cell(SETTING, "dense"), Cell(SETTING, "local-baseline"), Cell(SETTING, "centralized")]
    cells += [Cell(SETTING, strategy, "column", True) for strategy in ("one-shot", "iterative")]
    rows = Rows(tmp_path / "study.csv", PUBLIC)
    measure(studied(sites), cells, rows)
    found = {row.cell.method: row for row in rows.measured}
    for strategy in ("one-shot", "iterative"):
        changes = {
            "fedprllm__vote_group": "column",
            "fedprllm__weight_scaling": True,
            "pruning__strategy": strategy,
        }
        figures = app_figures(sites, **changes)
        assert found["dense"].perplexity == pytest.approx(figures["dense"], rel=FILE)
        assert found["local-baseline"].perplexity == pytest.approx(
            figures["local_baseline"], rel=6e-4
        )
        assert found["centralized"].perplexity == pytest.approx(figures["centralized"], rel=FILE)
        assert found[strategy].perplexity == pytest.approx(figures["federated"], rel=FILE)
        assert found[strategy].achieved_sparsity == pytest.approx(figures["sparsity"], abs=FILE)


def test_a_stopped_study_goes_on_where_it_was(
    sites: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = [Cell(SETTING, "dense"), Cell(SETTING, "centralized"), Cell(SETTING, "one-shot", "row")]
    whole = Rows(tmp_path / "whole.csv", PUBLIC)
    stopped = Rows(tmp_path / "stopped.csv", PUBLIC)
    measure(studied(sites), cells, whole)
    measure(studied(sites), cells[:2], stopped)
    calls = []
    monkeypatch.setattr(
        measuring,
        "mean_losses",
        lambda *given, real=measuring.mean_losses: calls.append(1) or real(*given),
    )
    measure(studied(sites), cells, Rows(stopped.path, PUBLIC))
    assert len(calls) == 1
    assert stopped.path.read_text() == whole.path.read_text()


def test_rows_of_other_conditions_are_not_mixed(tmp_path: Path) -> None:
    Rows(tmp_path / "study.csv", CONDITIONS)
    with pytest.raises(EspalierError, match="measured with other sequence_length, ties"):
        Rows(tmp_path / "study.csv", {**CONDITIONS, "ties": "index", "sequence_length": 32})


def rows_of(tmp_path: Path) -> Rows:
    """Return two cells with a row for each of two texts."""
    rows = Rows(tmp_path / "study.csv", CONDITIONS)
    for cell in (Cell(SETTING, "iterative", "layer", True), Cell(SETTING, "dense")):
        rows.add_measured([Row(cell, "wiki", 12.5, 0.5, 1), Row(cell, "c4", 1e9, 0, 1)])
    return rows


def test_rows_are_read_as_they_were_written(tmp_path: Path) -> None:
    rows = rows_of(tmp_path)
    assert Rows(rows.path, CONDITIONS).measured == rows.measured
    assert rows.missing_texts(Cell(SETTING, "dense"), ["wiki", "c4"]) == []
    assert rows.missing_texts(Cell(SETTING, "centralized"), ["wiki", "c4"]) == ["wiki", "c4"]


@pytest.mark.parametrize(("torn", "left"), [(1, 3), (30, 3), (70, 2)])
def test_interrupted_row_is_measured_again(torn: int, left: int, tmp_path: Path) -> None:
    rows = rows_of(tmp_path)
    rows.path.write_text(rows.path.read_text()[:-torn])
    again = Rows(rows.path, CONDITIONS)
    assert again.measured == rows.measured[:left]
    assert again.missing_texts(Cell(SETTING, "dense"), ["wiki", "c4"]) == ["wiki", "c4"][left - 2 :]
    again.add_measured(rows.measured[left:])
    assert Rows(rows.path, CONDITIONS).measured == rows.measured


def test_a_text_may_be_added_later(sites: Federation, tmp_path: Path) -> None:
    """Only the new text is measured; the rows and figures of the others stay."""
    cells = [Cell(SETTING, "dense"), Cell(SETTING, "one-shot", "row")]
    bench = studied(sites)
    measure(bench, cells, Rows(tmp_path / "study.csv", PUBLIC))
    before = (tmp_path / "study.csv").read_text()
    more = Bench(bench.stream, {**bench.texts, "more": bench.texts["public"][:1]}, bench.common)
    second = {"texts": {**PUBLIC["texts"], "more": {"samples": 1, "sha256": "1"}}}
    measure(more, cells, Rows(tmp_path / "study.csv", second))
    again = Rows(tmp_path / "study.csv", second)
    assert (tmp_path / "study.csv").read_text().startswith(before)
    assert [(row.cell, row.text) for row in again.measured[2:]] == [
        (cell, "more") for cell in cells
    ]
    # A text may also be left out.
    measure(bench, cells, Rows(tmp_path / "study.csv", PUBLIC))
    assert Rows(tmp_path / "study.csv", PUBLIC).conditions == second


def test_published_ties_are_those_of_the_code(sites: Federation, tmp_path: Path) -> None:
    """Ties are random in layers and by index in rows and columns, as with these settings."""
    bench = studied(sites)
    published = Clients(
        bench.settings(SETTING), bench.stream, tmp_path / "published", published_ties=True
    )
    for group, ties in (("layer", "random"), ("row", "index"), ("column", "index")):
        plain = Bench(bench.stream, bench.texts, {**bench.common, "fedprllm.ties": ties})
        expected = Clients(plain.settings(SETTING), bench.stream, tmp_path / group).decide(
            "one-shot", group
        )
        found = published.decide("one-shot", group)
        for block in bench.stream.model.plan.blocks:
            masks = expected.prune_masks(block.index)
            assert all(
                torch.equal(mask, masks[name])
                for name, mask in found.prune_masks(block.index).items()
            )


def test_a_damaged_study_is_told_and_left_alone(tmp_path: Path) -> None:
    path = rows_of(tmp_path).path
    text = path.read_text()
    path.write_text(text.replace("12.5", "x", 1))
    with pytest.raises(EspalierError, match=r"study.csv: line 2 is damaged"):
        Rows(path, CONDITIONS)
    path.write_text(text)
    path.with_suffix(".json").write_text("{")
    with pytest.raises(EspalierError, match=r"study.json: is damaged"):
        Rows(path, CONDITIONS)
    path.with_suffix(".json").unlink()
    with pytest.raises(EspalierError, match=r"study.json is missing"):
        Rows(path, CONDITIONS)
    assert path.read_text() == text


@pytest.mark.parametrize("study", sorted(STUDIES))
def test_a_study_varies_what_the_paper_varies(study: str) -> None:
    cells = list(STUDIES[study]([0, 1, 2]))
    assert (
        len(cells)
        == len(set(cells))
        == 3 * {"table-1": 3 * 15, "table-4": 3 * 6, "figure-2": 6 * 4, "figure-3": 6 * 4}[study]
    )
    if study == "figure-2":
        assert {cell.setting.clients * cell.setting.samples for cell in cells} == {128}


@pytest.mark.parametrize("study", sorted(STUDIES))
def test_the_report_says_mean_and_spread(study: str, tmp_path: Path) -> None:
    """Perplexities 10, 12 and 17 over the seeds have mean 13.

    Their sample standard deviation is sqrt((9 + 1 + 16) / 2) = 3.606.
    """
    rows = Rows(tmp_path / f"{study}.csv", CONDITIONS)
    for cell in STUDIES[study]([0, 1, 2]):
        value = {0: 10.0, 1: 12.0, 2: 17.0}[cell.setting.seed]
        rows.add_measured([Row(cell, "wiki", value, 0.5, 1), Row(cell, "c4", 100 * value, 0.5, 1)])
    write_report(study, rows, tmp_path / study)
    text = (tmp_path / f"{study}.md").read_text()
    figures = re.findall(r"\| ([0-9.]+ ± [0-9.]+) (?=\|)", text)
    assert set(figures) == {"13.00 ± 3.61", "1300 ± 361"}
    assert text.count("| centralized |") == 2
    assert (tmp_path / f"{study}.png").read_bytes().startswith(b"\x89PNG")
