"""Arguments of ``espalier plan`` as they reach the app."""

from pathlib import Path
from typing import Any

import pytest

from espalier.cli.command import main

ROOT = str(Path(__file__).parents[3])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """Return the requests to the app."""
    found: list[tuple[str, dict[str, Any]]] = []

    def note(_: Path, module: str, document: dict[str, Any]) -> int:
        found.append((module, document))
        return 0

    monkeypatch.setattr("espalier.cli.app_commands.run_in_app", note)
    return found


def test_the_words_are_those_of_a_run(asked: list[tuple[str, dict[str, Any]]]) -> None:
    assert main(["plan", "fedspallm", "num-clients=3", "--app", ROOT, "--teraflops", "2"]) == 0
    ((module, document),) = asked
    assert module == "server_app.estimate.command"
    assert (document["run"]["method"], document["run"]["num-clients"]) == ("fedspallm", 3)
    assert (document["teraflops"], document["megabits"], document["measure"]) == (2.0, None, False)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--megabits", "-1"], "--megabits -1: must be from 1e-06 to 1e+09"),
        (["--teraflops", "0"], "--teraflops 0: must be from"),
        (["--megabits", "nan"], "--megabits nan: must be from"),
        (["--teraflops", "inf"], "--teraflops inf: must be from"),
        (["--teraflops", "2", "--measure"], "give the speed or measure it, not both"),
        (["pruning.sparsity=2"], "pruning.sparsity"),
        (["no-such-preset"], "no-such-preset"),
    ],
)
def test_wrong_words_are_told_before_opening(
    words: list[str],
    told: str,
    asked: list[tuple[str, dict[str, Any]]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", *words, "--app", ROOT]) == 2
    assert told in capsys.readouterr().err
    assert not asked
