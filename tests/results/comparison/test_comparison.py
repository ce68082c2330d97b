"""Comparison of runs: which are compared, with which figures, and as which files."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from espalier.cli.command import main as command
from espalier.errors import InputError
from espalier.results.comparison.command import main, markdown
from espalier.results.comparison.compared_runs import compare
from espalier.results.comparison.page import html_page
from espalier.results.comparison.table import csv_text, notes, plot_of, results_table
from tests.results.run_directories import BASE, OTHER_BASE, metric, save_run

TUNED = {
    "method": "fedpetuning",
    "size": {
        "dense": {"parameters": 800, "bytes": 3200, "folder": None},
        "federated": {"parameters": 50, "bytes": 200, "folder": "adapter"},
    },
}


def texts(value: str, **others: Any) -> dict[str, Any]:
    return {"evaluation": {"texts": value, "sequence-length": 256, "max-samples": 8} | others}


def test_runs_of_one_base_are_compared(tmp_path: Path) -> None:
    a = save_run(tmp_path / "a")
    b = save_run(tmp_path / "b", {"seed": 1}, metrics=[metric("wiki", 11.0)])
    found = compare([a, b])
    assert [entry.label for entry in found.entries] == ["a", "b"]
    assert found.values == {(0, ("wiki", "perplexity")): 12.0, (1, ("wiki", "perplexity")): 11.0}
    assert found.differing == {"seed": [0, 1]}
    assert (found.excluded, found.gaps) == ({}, [])


@pytest.mark.parametrize(
    ("settings", "summary", "reason"),
    [
        ({}, {"model_sha256": OTHER_BASE, "model": "big"}, "other base model: big (bbbbbbbbbbbb)"),
        (texts("c4=/c.txt"), {"metrics": [metric("c4", 9.0)]}, "other evaluation texts: c4"),
        (texts("wiki=/other.txt"), {}, "evaluation.texts = 'wiki=/other.txt', where a has"),
        (texts("wiki=/w.txt", **{"max-samples": 9}), {}, "evaluation.max-samples = 9, where a"),
        ({}, {"metrics": []}, "its result was not evaluated"),
        ({}, {"status": "failed", "reason": "RunFailed: few"}, "the run failed: RunFailed: few"),
        ({}, {"status": "running"}, "the run was interrupted"),
    ],
)
def test_runs_that_cannot_be_compared_are_named_with_a_reason(
    tmp_path: Path, settings: dict[str, Any], summary: dict[str, Any], reason: str
) -> None:
    a = save_run(tmp_path / "a")
    c = save_run(tmp_path / "c")
    b = save_run(tmp_path / "b", settings, **summary)
    found = compare([a, b, c])
    assert [entry.label for entry in found.entries] == ["a", "c"]
    assert reason in found.excluded["b"]
    with pytest.raises(InputError, match="no run can be compared with a"):
        compare([a, b])


def test_a_run_that_no_other_is_like_does_not_end_a_comparison(tmp_path: Path) -> None:
    """A folder of runs may begin with any of them."""
    a = save_run(tmp_path / "a", model_sha256=OTHER_BASE, model="big")
    b, c = save_run(tmp_path / "b"), save_run(tmp_path / "c")
    found = compare([a, b, c])
    assert [entry.label for entry in found.entries] == ["b", "c"]
    assert found.excluded["a"].startswith("other base model: big (bbbbbbbbbbbb), where b has")


def test_runs_in_folders_of_their_own_have_the_names_of_these(tmp_path: Path) -> None:
    """Names of runs are times and methods; the folders are what the user named."""
    runs = [
        save_run(tmp_path / "study" / name / "runs" / f"2026112{number}-000000-flap-1")
        for number, name in enumerate(("block", "kind"))
    ]
    assert [entry.label for entry in compare(runs).entries] == ["block", "kind"]
    beside = save_run(tmp_path / "study" / "kind" / "runs" / "20261129-000000-flap-1")
    labels = [entry.label for entry in compare([*runs, beside]).entries]
    assert labels == [run.name for run in [*runs, beside]]
    elsewhere = save_run(tmp_path / "runs" / "20261128-000000-flap-1")
    labels = [entry.label for entry in compare([runs[0], elsewhere]).entries]
    assert labels == [runs[0].name, elsewhere.name]


def test_hash_of_the_samples_decides_if_there_is_one(tmp_path: Path) -> None:
    """A file may be elsewhere and the same, or changed under its name."""
    a = save_run(tmp_path / "a", metrics=[metric("wiki", 12.0, samples_sha256="1")])
    b = save_run(
        tmp_path / "b", texts("wiki=/copy.txt"), metrics=[metric("wiki", 11.0, samples_sha256="1")]
    )
    c = save_run(tmp_path / "c", metrics=[metric("wiki", 11.0, samples_sha256="2")])
    found = compare([a, b, c])
    assert [entry.label for entry in found.entries] == ["a", "b"]
    assert "the file has other contents than in a" in found.excluded["c"]


def test_one_shared_text_suffices(tmp_path: Path) -> None:
    a = save_run(
        tmp_path / "a",
        texts("wiki=/w.txt,c4=/c.txt"),
        metrics=[metric("wiki", 12.0), metric("c4", 20.0)],
    )
    b = save_run(
        tmp_path / "b",
        texts("wiki=/w.txt,c4=/other.txt"),
        metrics=[metric("wiki", 11.0), metric("c4", 19.0)],
    )
    found = compare([a, b])
    assert sorted(found.values) == [
        (0, ("c4", "perplexity")),
        (0, ("wiki", "perplexity")),
        (1, ("wiki", "perplexity")),
    ]
    (gap,) = found.gaps
    assert gap.startswith("b: c4 perplexity is left out: evaluation.texts = 'c4=/other.txt'")


def test_a_chain_starts_from_the_model_of_its_first_run(tmp_path: Path) -> None:
    """Costs are sums over the chain, and an adapter is counted with the model it needs."""
    pruned = save_run(tmp_path / "pruned")
    settings = {"method": "fedpetuning", "model": str(pruned)}
    tuned = save_run(tmp_path / "tuned", settings, model_sha256=OTHER_BASE, **TUNED)
    found = compare([pruned, tuned])
    entry = found.entries[1]
    assert [run.name for run in entry.chain] == ["pruned", "tuned"]
    assert (entry.cost("parameters"), entry.cost("disk")) == (850.0, 3400.0)
    assert (entry.cost("bytes"), entry.cost("seconds")) == (200.0, 10.0)
    assert notes(found) == [
        "tuned: its base model comes from pruned, whose bytes and time are included"
    ]
    (model, moved) = (tmp_path / "pruned" / "model", tmp_path / "moved")
    same = save_run(tmp_path / "same", {"model": str(model)}, model_sha256=OTHER_BASE)
    assert len(compare([pruned, same]).entries) == 2
    pruned.rename(moved)
    # The model with which the chain began is known without the run, and the costs are not.
    first, second = compare([moved, tuned]).entries
    assert (first.base, second.base) == (BASE, BASE)
    assert [second.cost(name) for name in ("bytes", "seconds")] == [None, None]
    assert second.original.parameters is None


def test_runs_that_moved_together_stay_a_chain(tmp_path: Path) -> None:
    pruned = save_run(tmp_path / "runs" / "pruned")
    settings = {"method": "fedpetuning", "model": str(pruned)}
    save_run(tmp_path / "runs" / "tuned", settings, model_sha256=OTHER_BASE, **TUNED)
    (tmp_path / "runs").rename(tmp_path / "elsewhere")
    found = compare([tmp_path / "elsewhere" / name for name in ("pruned", "tuned")])
    assert [run.name for run in found.entries[1].chain] == ["pruned", "tuned"]


def test_chain_in_a_circle_ends(tmp_path: Path) -> None:
    a = save_run(tmp_path / "a", {"model": str(tmp_path / "b")})
    b = save_run(tmp_path / "b", {"model": str(a)})
    assert [run.name for run in compare([a, b]).entries[0].chain] == ["b", "a"]


def test_settings_of_other_methods_count_if_they_are_no_defaults(tmp_path: Path) -> None:
    a = save_run(tmp_path / "a", {"pruning": {"ratio": 0.2, "channel-multiple": 8}})
    b = save_run(tmp_path / "b", {"method": "slicegpt", "out-dir": "/x"})
    assert compare([a, b]).differing == {
        "method": ["flap", "slicegpt"],
        "pruning.channel-multiple": [8, None],
    }


def test_table_marks_the_best_and_the_front(tmp_path: Path) -> None:
    a = save_run(tmp_path / "a")
    b = save_run(tmp_path / "b", metrics=[metric("wiki", 11.0)], bytes_up=80, bytes_down=40)
    c = save_run(tmp_path / "c", metrics=[metric("wiki", 13.0)], bytes_up=80)
    found = compare([a, b, c])
    plot = plot_of(found, "", "bytes")
    assert plot is not None
    assert [(point.cost, point.quality) for point in plot.points] == [
        (1e-4, 12.0),
        (1.2e-4, 11.0),
        (1.1e-4, 13.0),
    ]
    assert plot.reference == 10.0
    table = results_table(found, plot)
    dense, *rows = [[cell.text for cell in row] for row in table.rows]
    assert dense == ["", "base", "dense", "10.00", "1,000", "4 kB", *[""] * 4]
    assert rows[0] == [
        *("1", "a", "flap", "12.00", "800 (80.0%)", "3.2 kB", "70 B", "30 B", "5 s", "yes"),
    ]
    assert [row[-1] for row in rows] == ["yes", "yes", ""]
    assert [cell.text for row in table.rows for cell in row if cell.best] == ["11.00"]


def test_plot_shows_size_if_sizes_differ(tmp_path: Path) -> None:
    a = save_run(tmp_path / "a")
    b = save_run(tmp_path / "b")
    assert compare([a, b]).axis("") == "bytes"
    size = {"federated": {"parameters": 700, "bytes": 1, "folder": "model"}}
    c = save_run(tmp_path / "c", size=size)
    assert compare([a, b, c]).axis("") == "parameters"
    with pytest.raises(InputError, match=r"--metric 'x': these runs have 'wiki perplexity'"):
        compare([a, b]).quality("x")


def test_csv_has_plain_numbers(tmp_path: Path) -> None:
    a = save_run(tmp_path / "a", {"seed": 3})
    b = save_run(tmp_path / "b", {"method": "fedpetuning"}, **TUNED)
    first, second = csv.DictReader(io.StringIO(csv_text(compare([a, b]))))
    assert (first["wiki perplexity federated"], first["wiki perplexity dense"]) == ("12.0", "10.0")
    assert (first["parameters"], first["bytes_up"], first["seed"]) == ("800", "70", "3")
    assert (second["is_adapter"], second["parameters_in_use"]) == ("True", "850")


def test_files_quote_what_they_show(tmp_path: Path) -> None:
    a = save_run(tmp_path / "<b>|a", model="<script>alert(1)</script>")
    b = save_run(tmp_path / "b", size={})
    found = compare([a, b])
    plot = plot_of(found, "", "")
    page = html_page(found, plot)
    assert "<script>" not in page
    assert "&lt;b&gt;|a" in page
    assert "http://www.w3.org" in page
    assert 'src="' not in page
    assert r"\|a" in markdown(found, plot)


def test_command_writes_files_and_refuses_others(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    save_run(tmp_path / "runs" / "a")
    save_run(tmp_path / "runs" / "b", metrics=[metric("wiki", 11.0)])
    out = [str(tmp_path / f"x.{ending}") for ending in ("html", "md", "csv", "png", "svg")]
    words = [word for file in out for word in ("--out", file)]
    assert command(["compare", str(tmp_path / "runs"), *words]) == 0
    assert "written: " in capfd.readouterr().out
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in (tmp_path / "x.svg").read_bytes()
    for name, reason in (("x.pdf", "must end in"), ("no/x.md", "is not a directory")):
        assert command(["compare", str(tmp_path / "runs"), "--out", str(tmp_path / name)]) == 2
        assert reason in capfd.readouterr().err


def test_plot_needs_two_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = save_run(tmp_path / "a", size={})
    b = save_run(tmp_path / "b", size={})
    document = {"runs": [str(a), str(b)], "out": [str(tmp_path / "x.png")], "metric": ""}
    assert main(document | {"against": "disk"}) == 2
    assert "fewer than two runs have both values" in capsys.readouterr().err
    assert main(document | {"against": "disk", "out": []}) == 0
    assert "Pareto" not in capsys.readouterr().out


def test_damaged_summary_is_named(tmp_path: Path) -> None:
    a = save_run(tmp_path / "a")
    b = save_run(tmp_path / "b", size={"federated": {"parameters": "many"}})
    document = json.loads((b / "summary.json").read_text())
    assert document["size"]
    with pytest.raises(
        InputError, match=r"b/summary\.json: size\.federated\.parameters = 'many': "
    ):
        results_table(compare([a, b]), None)
