"""A server that gives one client other settings, adapters or masks than the rest gets no sum of it.

Otherwise it could choose what it gives to the rest so that it knows what they contribute.
"""

from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, Message

import client_app.protocol.answer_once as answer_once
from espalier.messages.message import Header
from espalier.messages.records import read, write
from espalier.messages.tensor_blobs import pack_tensors, unpack_tensors
from tests.bench import Bench, Home, model_files, summary
from tests.federation.secure_sum.test_summands import EXACT, TUNED, save_deep
from tests.in_process import InProcessGrid
from tests.methods.promises.secure_sum_promises import SECURE, silent_from

TARGET = 2
UNREADABLE = "shares: 3 clients could not read the shares"


def with_other_tensors(grid: InProcessGrid, server_round: int) -> None:
    """Reverse the tensors that the target gets before, or with, the order of a round."""
    answer = grid.answer

    def changed(message: Message, context: Context) -> Message:
        body = read(message.content)
        header = body.header
        if header.client == TARGET and header.server_round == server_round:
            if header.kind in ("train", "push") and body.blobs:
                for key, blob in body.blobs.items():
                    tensors = unpack_tensors(blob).items()
                    body.blobs[key] = pack_tensors(
                        {name: own[::-1].copy() for name, own in tensors}
                    )
                message.content = write(body)
        return answer(message, context)

    grid.answer = changed  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("method", "settings", "changes"),
    [
        ("fedpetuning", TUNED, {"training.learning-rate": 1e-12}),
        ("fedprllm", {}, {"pruning.sparsity": 0.001}),
        ("pooled-pruning", {}, {"data.num-samples": 1}),
    ],
)
def test_a_client_with_other_settings_is_not_in_the_sum(
    tmp_path: Path, method: str, settings: dict[str, Any], changes: dict[str, Any]
) -> None:
    bench = Bench(tmp_path, method, settings | SECURE)
    grid = bench.grid()
    for context in grid.contexts.values():
        if context.node_config["partition-id"] == TARGET:
            context.run_config |= changes
    folder = bench.run(grid)
    told = summary(folder)["clients"][TARGET]
    assert (told["status"], told["reason"].startswith(UNREADABLE)) == ("dropped", True)
    silent = bench.grid()
    silent.tamper[TARGET] = silent_from("train")
    assert model_files(folder) == model_files(bench.run(silent))


def test_a_client_with_other_start_adapters_is_not_in_the_sum(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "fedpetuning", TUNED | SECURE)
    grid = bench.grid()
    with_other_tensors(grid, 2)
    told = summary(bench.run(grid))["clients"][TARGET]
    assert (told["status"], told["reason"].startswith(UNREADABLE)) == ("dropped", True)


@pytest.mark.parametrize("method", ["fedprllm iterative", "pooled-pruning iterative"])
def test_earlier_decisions_are_part_of_an_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Masks of the first block decide the inputs of the third one, two rounds later."""
    asked: dict[tuple[int, int], str] = {}
    hashed = answer_once._asked

    def noted(site: Any, request: Any, rests_on: Any) -> str:
        header: Header = request.header
        found = hashed(site, request, rests_on)
        if header.kind == "train":
            asked[header.server_round, header.client] = found
        return found

    monkeypatch.setattr(answer_once, "_asked", noted)
    shared: Home = save_deep(tmp_path)
    settings = EXACT.get(method, {"pruning.strategy": "iterative"})
    bench = Bench(tmp_path, method.split()[0], settings, home=shared)
    grid = bench.grid()
    with_other_tensors(grid, 2)
    bench.run(grid)
    for server_round, differ in ((1, False), (2, True), (3, True)):
        of_round = [asked[server_round, client] for client in range(4)]
        others = {own for client, own in enumerate(of_round) if client != TARGET}
        assert len(others) == 1
        assert (of_round[TARGET] not in others) == differ
