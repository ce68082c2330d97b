"""Sparsity in the table of a run, and the notes about it."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from espalier.hf.opening.opened_model import OpenedModel
from espalier.messages.ledger import Traffic
from espalier.results.figures import Size
from espalier.settings.run import parse
from server_app.artifacts.pruned_model import rounding_notes
from server_app.report.result_size import larger_than_base, size_of_base, size_of_result
from server_app.report.summary import Summary
from server_app.report.table import show
from tests.tiny_model import save_tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> OpenedModel:
    """Create the bench's model.

    Each block has attention matrices of shapes (16, 16), (8, 16), (8, 16), (16, 16) and
    feed-forward matrices of shapes (24, 16), (24, 16), (16, 24).
    """
    return OpenedModel(save_tiny_llama(tmp_path_factory.mktemp("model")))


def summary(model: OpenedModel, local: float, federated: float, **settings: Any) -> Summary:
    given = {key.replace("__", ".").replace("_", "-"): value for key, value in settings.items()}
    found = Summary(
        parse(given), model, 1, "cpu", losses={"public": {"dense": 3.0, "federated": 3.0}}
    )
    found.local_sparsity = found.centralized_sparsity = local
    found.sparsity = found.masked = federated
    found.zeroed = True
    return found


def of_sizes(model: OpenedModel, **sizes: Size) -> Summary:
    """Return a FLAP summary with one size per column."""
    found = Summary(
        parse({"method": "flap"}),
        model,
        1,
        "cpu",
        losses={"public": {"dense": 3.0, "federated": 3.0}},
    )
    found.sizes = dict(sizes)
    found.warnings = larger_than_base(sizes["dense"], sizes.get("federated"), found.settings)
    return found


def printed(found: Summary, capsys: pytest.CaptureFixture[str]) -> list[str]:
    show(found, Traffic())
    return capsys.readouterr().out.splitlines()


def row(lines: list[str], label: str) -> list[str]:
    """Return the cells of a row of a printed table."""
    (line,) = [line for line in lines if line.startswith(f"│ {label} ")]
    return [cell.strip() for cell in line.strip("│").split("│")]


def test_a_smaller_model_is_shown_with_its_size(
    model: OpenedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = printed(
        of_sizes(model, dense=Size(4000, 16_000), federated=Size(3000, 12_100, "model")), capsys
    )
    assert row(lines, "dense")[2:4] == ["4,000", "16 kB"]
    assert row(lines, "federated")[2:4] == ["3,000 (75.0%)", "12.1 kB"]
    assert not any("sparsity" in line or "warning" in line for line in lines)


def test_an_adapter_comes_on_top_of_its_base(
    model: OpenedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = printed(
        of_sizes(model, dense=Size(4000, 16_000), federated=Size(200, 900_000, "adapter")), capsys
    )
    assert row(lines, "federated")[2:4] == ["+200", "+900 kB"]
    assert not any("warning" in line for line in lines)


def test_larger_result_than_base_is_warned_of(
    model: OpenedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    found = of_sizes(model, dense=Size(4000, 16_000), federated=Size(4068, 16_272, "model"))
    assert found.warnings == [
        "the result is larger than its base: 4,068 parameters, where the base has 4,000"
        " (101.7%), 16.3 kB on disk, where the base has 16 kB (101.7%); raise pruning.ratio to make"
        " it smaller"
    ]
    assert any(line.startswith("warning: the result is larger") for line in printed(found, capsys))


def test_warning_of_larger_result_is_recorded(model: OpenedModel, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    number = model.plan.num_parameters + 1000
    save_file({"one": np.zeros(number, np.float32)}, tmp_path / "model" / "model.safetensors")
    found = summary(model, 0.5, 0.5, method="slicegpt")
    found.take_sizes(tmp_path)
    (warning,) = found.warnings
    assert warning.startswith(f"the result is larger than its base: {number:,} parameters")
    assert warning.endswith("; raise slicegpt.width-pruning-ratio to make it smaller")


def test_a_result_as_large_as_its_base_is_not(model: OpenedModel) -> None:
    """File headers may differ in size."""
    assert larger_than_base(Size(4000, 16_000), Size(4000, 16_040, "model"), parse({})) == []


def test_rows_without_any_figure_are_left_out(
    model: OpenedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    found = summary(model, 0.5, 0.5)
    lines = printed(found, capsys)
    assert not any("local-baseline" in line or "centralized" in line for line in lines)
    found.losses["public"]["centralized"] = 3.1
    assert row(printed(found, capsys), "centralized")[4] == "50.00%"


def test_a_long_run_is_told_in_hours(
    model: OpenedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    found = summary(model, 0.5, 0.5)
    found.seconds = 5420.0
    assert row(printed(found, capsys), "federated")[-1] == "1 h 30 min"


def test_sizes_are_those_of_the_files(tmp_path: Path, model: OpenedModel) -> None:
    for name, number in (("model", 24), ("adapter", 6), ("clients/a", 8), ("clients/b", 16)):
        (tmp_path / name).mkdir(parents=True)
        save_file(
            {"one": np.zeros((2, number // 2), np.float16)}, tmp_path / name / "weights.safetensors"
        )
    assert size_of_result(tmp_path, personal=False) == Size(
        24, (tmp_path / "model/weights.safetensors").stat().st_size, "model"
    )
    own = size_of_result(tmp_path, personal=True)
    assert own is not None
    assert own.parameters == 12
    shutil.rmtree(tmp_path / "model")
    adapter = size_of_result(tmp_path, personal=False)
    assert adapter is not None
    assert adapter.is_adapter
    base = size_of_base(model)
    assert (base.parameters, base.num_bytes) == (
        model.plan.num_parameters,
        (model.directory / "model.safetensors").stat().st_size,
    )


def test_rounded_rows_are_explained_by_hand(model: OpenedModel) -> None:
    """Rows of 16 weights lose int(9.6) = 9, rows of 24 lose int(14.4) = 14.

    That is 96 * 9 + 16 * 14 of 1920 weights per block, or 56.67%.
    """
    share = (96 * 9 + 16 * 14) / (96 * 16 + 16 * 24)
    notes = rounding_notes(summary(model, share, 0.6, pruning__sparsity=0.6))
    assert notes == [
        "local-baseline and centralized: 56.67% instead of 60.00%, because each row of a matrix"
        " loses 60.00% of its weights, rounded down"
    ]


def test_the_federated_model_is_explained_too(model: OpenedModel) -> None:
    share = (96 * 9 + 16 * 14) / (96 * 16 + 16 * 24)
    groups = {"pruning__comparison_group": "layer", "fedprllm__vote_group": "row"}
    (note,) = rounding_notes(summary(model, 0.6, share, pruning__sparsity=0.6, **groups))
    assert note.startswith("federated: 56.67% instead of 60.00%, because each row of a matrix ")


@pytest.mark.parametrize(
    ("local", "settings"),
    [
        (0.5, {"pruning__sparsity": 0.5}),
        (0.5, {"pruning__sparsity": 0.3, "pruning__pattern": "2:4"}),
        (0.3, {"method": "fedspallm", "fedspallm__sampled_layers": 0.6}),
    ],
)
def test_no_note_without_rounded_row(
    model: OpenedModel, local: float, settings: dict[str, Any]
) -> None:
    assert rounding_notes(summary(model, local, local, **settings)) == []


@pytest.mark.parametrize(
    ("local", "centralized", "named"),
    [(True, False, "local-baseline"), (False, True, "centralized"), (False, False, None)],
)
def test_note_names_the_rows_that_there_are(
    model: OpenedModel, local: bool, centralized: bool, named: str | None
) -> None:
    share = (96 * 9 + 16 * 14) / (96 * 16 + 16 * 24)
    changes = {"pruning__sparsity": 0.6, "evaluation__local_baseline": local}
    found = summary(model, share, 0.6, **changes)
    if not centralized:
        found.centralized_sparsity = None
    notes = rounding_notes(found)
    assert [note.partition(":")[0] for note in notes] == ([named] if named else [])


def test_the_note_stands_below_the_table(
    model: OpenedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    share = (96 * 9 + 16 * 14) / (96 * 16 + 16 * 24)
    found = summary(model, share, 0.6, pruning__sparsity=0.6)
    found.notes = rounding_notes(found)
    show(found, Traffic())
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("local-baseline and centralized: 56.67% instead of 60.00%")
    assert lines[-2].startswith("└")


def test_base_that_another_run_made_is_not_called_dense(
    model: OpenedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(model.directory, run / "model")
    (run / "settings.toml").write_text("")
    document = {"method": "flap", "status": "completed", "metrics": []}
    (run / "summary.json").write_text(json.dumps(document))
    lines = printed(summary(OpenedModel(run / "model"), 0.5, 0.5), capsys)
    assert any("base (flap)" in line for line in lines)
    assert not any("dense" in line for line in lines)
    assert any("dense" in line for line in printed(summary(model, 0.5, 0.5), capsys))
