"""Completion of the words of ``espalier run`` in a shell."""

import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from espalier.cli.app_commands import complete_words

APP = str(Path(__file__).parents[3])


@pytest.mark.parametrize(
    ("prefix", "expected"),
    [
        ("pruning.sparsity=", []),
        ("pruning.strategy=", ["pruning.strategy=one-shot", "pruning.strategy=iterative"]),
        ("lora.merge=", ["lora.merge=true", "lora.merge=false"]),
        ("no-such-key=", []),
    ],
)
def test_listable_values_of_key_are_offered(prefix: str, expected: list[str]) -> None:
    assert complete_words(prefix, Namespace(app=APP)) == expected


def test_presets_and_keys_are_offered() -> None:
    words = complete_words("", Namespace(app=APP))
    assert {"fedprllm", "fedot", "two-sites", "num-clients=", "pruning.sparsity="} <= set(words)


@pytest.mark.parametrize("words", [["flap"], ["method=flap"], ["fedprllm", "method=flap"]])
def test_after_a_method_its_keys_and_values_are_offered(words: list[str]) -> None:
    given = Namespace(app=APP, words=words)
    offered = set(complete_words("", given))
    assert {"pruning.ratio=", "flap.bias-compensation=", "num-clients="} <= offered
    assert not offered & {"pruning.sparsity=", "fedprllm.ties=", "lora.rank=", "federation.rounds="}
    assert ("llm-pruner" in offered) == (words == ["method=flap"]), "one preset is enough"
    selections = complete_words("pruning.selection=", given)
    assert [text.partition("=")[2] for text in selections] == ["auto", "global", "block", "kind"]
    rules = complete_words("federation.aggregation-rule=", given)
    assert rules[0] == "federation.aggregation-rule=auto"
    assert "federation.aggregation-rule=median" in rules


def test_without_an_app_keys_are_offered(tmp_path: Path) -> None:
    words = complete_words("", Namespace(app=str(tmp_path)))
    assert "num-clients=" in words
    assert "fedprllm" not in words


def test_a_shell_gets_the_words_that_begin_alike(tmp_path: Path) -> None:
    line = "espalier run two"
    asked = {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_SUPPRESS_SPACE": "1",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "answer"),
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
    }
    command = [sys.executable, "-m", "espalier"]
    subprocess.run(command, cwd=APP, env=os.environ | asked, check=True)
    assert (tmp_path / "answer").read_text().split("\x0b") == ["two-sites"]
