"""The mean over clients, and the median if one client distorts the mean."""

from typing import Any

import pytest

from espalier.amounts import figure
from espalier.environment.paths import DEMO
from espalier.hf.opening.opened_model import open_model
from espalier.messages.ledger import Traffic
from espalier.settings.run import parse
from server_app.report.summary import Summary
from server_app.report.table import show


def shown(
    capsys: pytest.CaptureFixture[str], local: list[float], **more: Any
) -> tuple[Summary, dict[str, list[str]]]:
    """Return the summary and the rows of the printed table by their first cell."""
    model = open_model(DEMO)
    summary = Summary(parse({}), model, 1, "cpu", losses={"public": {"dense": 1.0}}, **more)
    summary.local_perplexities = {"public": dict(enumerate(local))}
    show(summary, Traffic())
    lines = [
        line.strip("│").split("│")
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("│")
    ]
    return summary, {name.strip(): [cell.strip() for cell in cells] for name, *cells in lines}


def test_absurd_loss_spoils_the_mean_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    summary, rows = shown(capsys, [10.0, 11.0, 12.0, 13.0, 1e12])
    assert rows["local-baseline (median)"][0] == "12.00"
    metric = summary.metrics()[0].to_json()
    assert metric["medians_of_clients"] == {"local_baseline": 12.0}
    assert metric["worst_of_clients"] == {"local_baseline": 1e12}


def test_infinite_loss_leaves_the_median(capsys: pytest.CaptureFixture[str]) -> None:
    _, rows = shown(capsys, [10.0, 11.0, float("inf")])
    assert rows["local-baseline (mean)"][0] == "inf"
    assert rows["local-baseline (median)"][0] == "11.00"


def test_table_shows_mean_if_clients_agree(
    capsys: pytest.CaptureFixture[str],
) -> None:
    summary, rows = shown(capsys, [10.0, 10.2, 10.1])
    assert rows["local-baseline (mean)"][0] == "10.10"
    assert "local-baseline (median)" not in rows
    assert summary.metrics()[0].medians() == {"local_baseline": 10.1}


def test_scores_and_own_text_have_medians_too(capsys: pytest.CaptureFixture[str]) -> None:
    own = {
        client: {"dense": value, "federated": 2 * value}
        for client, value in enumerate((4.0, 5.0, 900.0))
    }
    summary, rows = shown(
        capsys,
        [10.0],
        own_text=own,
        scores={"acc": {}},
        local_scores={"acc": {0: 0.2, 1: 0.3, 2: 1.0}},
    )
    _, own_text, accuracy = summary.metrics()
    assert own_text.medians() == {"dense": 5.0, "federated": 10.0}
    assert accuracy.medians() == {"local_baseline": 0.3}
    assert rows["local-baseline (median)"][:3] == ["10.00", "-", "0.300"]


def test_median_of_two_is_the_lower_figure(capsys: pytest.CaptureFixture[str]) -> None:
    """The median is the figure of a client; the mean of two is distorted by either."""
    summary, rows = shown(
        capsys, [1e12, 10.0], scores={"loss": {}}, local_scores={"loss": {0: 4.0, 1: 2.0}}
    )
    assert rows["local-baseline (mean)"][:2] == ["5e+11", "3.000"]
    assert rows["local-baseline (median)"][:2] == ["10.00", "2.000"]
    assert summary.metrics()[0].medians() == {"local_baseline": 10.0}


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (None, 2, "-"),
        (12.345, 2, "12.35"),
        (0.5, 3, "0.500"),
        (999_999.99, 2, "999999.99"),
        (1e6, 2, "1e+06"),
        (1_234_567.0, 2, "1.23e+06"),
        (-4.5e300, 3, "-4.5e+300"),
        (float("inf"), 2, "inf"),
        (float("nan"), 2, "nan"),
    ],
)
def test_huge_figures_are_short(value: float | None, digits: int, text: str) -> None:
    assert figure(value, digits) == text
