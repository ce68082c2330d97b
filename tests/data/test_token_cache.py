"""Token ids are encoded once while the files stay the same, and again when they change."""

import json
from pathlib import Path
from typing import Any

import pytest

from espalier.data import token_cache
from espalier.data.token_cache import cached_tokens, forget_tokens
from espalier.hf.opening.opened_model import OpenedModel
from espalier.settings.node import NodeSettings, parse_node
from espalier.settings.run import parse
from espalier.training.sequences import client_sequences
from tests.tiny_model import save_tiny_llama

TASK = {"method": "fedpetuning", "task.name": "dolly", "task.max-tokens": 99}
TEXT = {"method": "fedpetuning", "data.sequence-length": 8}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> OpenedModel:
    return OpenedModel(save_tiny_llama(tmp_path_factory.mktemp("model")))


@pytest.fixture(autouse=True)
def empty() -> None:
    forget_tokens()


def write(file: Path, word: str) -> None:
    records = [
        {"instruction": f"{word} {number}", "response": "elm", "text": f"{word} " * 9 + str(number)}
        for number in range(40)
    ]
    file.write_text("\n".join(map(json.dumps, records)))


def node_of(file: Path, task: bool, **given: Any) -> NodeSettings:
    names = {"data-task": "dolly"} if task else {"data-field": "text"}
    own = {"site": "a", "data-path": str(file), "min-tokens": 1, **names}
    return parse_node(own | given)


def counted(model: OpenedModel, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    encoded: list[str] = []
    original = OpenedModel.encode

    def encode(self: OpenedModel, text: str, *args: Any) -> Any:
        encoded.append(text)
        return original(self, text, *args)

    monkeypatch.setattr(OpenedModel, "encode", encode)
    return encoded


@pytest.mark.parametrize("task", [True, False])
def test_a_client_encodes_its_text_once(
    task: bool, model: OpenedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.jsonl"
    write(file, "oak")
    settings = parse(TASK if task else TEXT)
    encoded = counted(model, monkeypatch)
    node = node_of(file, task)
    first = client_sequences(settings, node, model, 0)
    number = len(encoded)
    assert number
    again = client_sequences(settings, node, model, 0)
    assert len(encoded) == number
    assert again.batch([0, 1]).input_ids.tolist() == first.batch([0, 1]).input_ids.tolist()
    assert again.parts[0] is first.parts[0]
    # Another length is other sequences.
    shorter = parse(TASK | {"task.max-tokens": 9} if task else TEXT | {"data.sequence-length": 4})
    other = client_sequences(shorter, node, model, 0)
    assert other.batch([0]).input_ids.shape[1] <= 9
    write(file, "fir")
    changed = client_sequences(settings, node, model, 0)
    assert changed.batch([0]).input_ids.tolist() != first.batch([0]).input_ids.tolist()
    kept_nothing = client_sequences(
        settings, node_of(file, task, **{"keep-model": False}), model, 0
    )
    assert kept_nothing.parts[0] is not changed.parts[0]
    assert kept_nothing.batch([3]).input_ids.tolist() == changed.batch([3]).input_ids.tolist()


def test_the_values_that_were_used_last_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_cache, "MOST_TOKENS", 10)
    made: list[str] = []

    def get(key: str, tokens: int) -> str:
        def make() -> tuple[str, int]:
            made.append(key)
            return key.upper(), tokens

        return cached_tokens(key, make)

    assert [get(key, 4) for key in "aba"] == ["A", "B", "A"]
    assert made == ["a", "b"]
    # B leaves, since A was used after it.
    get("c", 4)
    get("a", 4)
    get("b", 4)
    assert made == ["a", "b", "c", "b"]
    # One that is too long stays alone until another comes.
    get("d", 99)
    get("d", 99)
    get("a", 4)
    assert made == ["a", "b", "c", "b", "d", "a"]
    forget_tokens()
    get("a", 4)
    assert made[-1] == "a"
    assert len(made) == 7
