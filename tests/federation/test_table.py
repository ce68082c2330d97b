"""What the table of a run shows of sparsity, and what it says of it."""

from typing import Any

import pytest
from tiny_model import save_tiny_llama

from espalier.modeling.opened import OpenedModel
from espalier.settings.run import parse
from espalier.wire.ledger import Traffic
from server_app.outcomes.pruned import rounding_notes
from server_app.results import Summary
from server_app.table import show


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> OpenedModel:
    """Per block: attention of (16, 16), (8, 16), (8, 16), (16, 16), feed-forward of (24, 16), (24, 16), (16, 24)."""
    return OpenedModel(save_tiny_llama(tmp_path_factory.mktemp("model")))


def summary(model: OpenedModel, local: float, federated: float, **settings: Any) -> Summary:
    given = {key.replace("__", ".").replace("_", "-"): value for key, value in settings.items()}
    found = Summary(parse(given), model, 1, "cpu", losses={"public": {"dense": 3.0, "federated": 3.0}})
    found.local_sparsity = found.centralized_sparsity = local
    found.sparsity = found.masked = federated
    return found


def test_rows_that_are_rounded_down_are_explained_by_hand(model: OpenedModel) -> None:
    """Rows of 16 lose int(9.6) = 9, those of 24 int(14.4) = 14: 96 * 9 + 16 * 14 of 1920 weights in each block, 0.5666."""
    share = (96 * 9 + 16 * 14) / (96 * 16 + 16 * 24)
    notes = rounding_notes(summary(model, share, 0.6, fedprllm__sparsity=0.6))
    assert notes == [
        "local-only and centralized: 56.67%, not 60.00%, as each row of a matrix loses 0.6 times its weights, rounded down "
        "(fedprllm.local-comparison-group = 'row')"
    ]


def test_the_federated_model_is_explained_too(model: OpenedModel) -> None:
    share = (96 * 9 + 16 * 14) / (96 * 16 + 16 * 24)
    groups = {"fedspallm__local_method": "wanda", "fedspallm__comparison_group": "row"}
    (note,) = rounding_notes(summary(model, 0.6, share, method="fedspallm", fedspallm__sparsity=0.6, **groups))
    assert note.startswith("federated: 56.67%, not 60.00%, as each row of a matrix ")
    assert "fedspallm.comparison-group = 'row'" in note


@pytest.mark.parametrize(
    ("local", "settings"),
    [
        (0.5, {"fedprllm__sparsity": 0.5}),
        (0.5, {"fedprllm__sparsity": 0.3, "fedprllm__pattern": "2:4"}),
        (0.3, {"method": "fedspallm", "fedspallm__sampled_layers": 0.6}),
    ],
)
def test_what_is_shown_as_asked_for_or_low_for_another_reason_gets_no_such_note(
    model: OpenedModel, local: float, settings: dict[str, Any]
) -> None:
    assert rounding_notes(summary(model, local, local, **settings)) == []


def test_the_note_stands_below_the_table(model: OpenedModel, capsys: pytest.CaptureFixture[str]) -> None:
    share = (96 * 9 + 16 * 14) / (96 * 16 + 16 * 24)
    found = summary(model, share, 0.6, fedprllm__sparsity=0.6)
    found.notes = rounding_notes(found)
    show(found, Traffic())
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("local-only and centralized: 56.67%, not 60.00%")
    assert lines[-2].startswith("└")
