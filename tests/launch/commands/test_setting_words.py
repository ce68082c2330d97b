"""Errors for settings in the form of other programs, and for misspelled names of presets."""

from pathlib import Path

import pytest

from espalier.cli.command import main

FORM = "settings have the form key=value, without leading dashes and without spaces; write "


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        ("run --num-clients 3", "--num-clients: ... num-clients=3"),
        ("run fedprllm --num-clients=3", "--num-clients=3: ... num-clients=3"),
        ("run --num_clients 3", "--num_clients: ... num-clients=3"),
        ("run --num-clients", "--num-clients: ... num-clients=VALUE"),
        ("run --num-clients --seed 1", "--num-clients: ... num-clients=VALUE"),
        ("run --num-clients --seed 1", "--seed: ... seed=1"),
        ("run --num-client 3", "--num-client: ... num-clients=3"),
        ("run --pruning.sparsity 0.6", "--pruning.sparsity: ... pruning.sparsity=0.6"),
        ("run fedspallm --sparsity 0.6", "--sparsity: ... pruning.sparsity=0.6"),
        ("plan fedpetuning --rounds 3", "--rounds: ... federation.rounds=3"),
        ("check-node site=\"a\" --num-clients 3", "--num-clients: ... num-clients=3"),
    ],
)  # fmt: skip
def test_an_option_that_is_a_setting_is_explained(
    words: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2
    assert remedy.replace("... ", FORM) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        ("run num-clients 3", "num-clients=3"),
        ("run num-clients: 3", "num-clients=3"),
        ("run num-clients = 3", "num-clients=3"),
        ("run num-clients =3", "num-clients=3"),
        ("run fedprllm num-clients", "num-clients=VALUE"),
        ("run num-clients seed=1", "num-clients=VALUE"),
    ],
)
def test_a_setting_s_name_by_itself_is_no_preset(
    words: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 2
    assert capsys.readouterr().err == f"espalier: num-clients: {FORM}{remedy}\n"


@pytest.mark.parametrize("words", ["run --foo", "app --num-clients 3", "run -n 3"])
def test_other_options_are_unknown(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(words.split())
    err = capsys.readouterr().err
    assert err.startswith(f"usage: espalier {words.split()[0]} ")
    assert "unrecognized arguments: -" in err


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("fedprlm", "fedprllm"),
        ("FedSODA", "fedsoda"),
        ("hetlorra", "hetlora"),
        ("conf/two-sites.toml", "two-sites"),
    ],
)
def test_a_preset_that_is_none_gets_a_suggestion(
    name: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", name]) == 2
    said = capsys.readouterr().err
    assert f"did you mean '{meant}'? known presets are fed-sb, fedbiot, " in said


def test_unrelated_name_lists_all_presets(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["run", "wikipedia"]) == 2
    said = capsys.readouterr().err
    assert "did you mean" not in said
    assert "known presets are fed-sb, fedbiot, " in said
