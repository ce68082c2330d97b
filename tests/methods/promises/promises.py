"""Promises of every method (docs/develop/design.md, "Promises").

To test a method, subclass ``Promises`` and define the method's settings.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message
from transformers import AutoModelForCausalLM, AutoTokenizer

from espalier.hf.opening.opened_model import OpenedModel
from espalier.messages.records import read
from strategies.base.rounds import RunFailed
from tests.bench import Bench, private_text, summary
from tests.methods.promises.contracts import ContractPromises
from tests.methods.promises.failures import FailurePromises
from tests.methods.promises.federations import Uninterrupted
from tests.methods.promises.orders import OrderPromises


def held_out(passage: str) -> bool:
    """Apply the documented rule: the SHA-256 of a passage's words modulo 100 is below 10.

    Only the first 8 bytes of the digest count.
    """
    digest = hashlib.sha256(" ".join(passage.split()).encode()).digest()
    return int.from_bytes(digest[:8], "big") % 100 < 10


def count_zeros(pruned: torch.nn.Module, dense: torch.nn.Module) -> dict[str, int]:
    """Return the number of zeros per block linear that the dense model does not have."""
    before = dict(dense.named_parameters())
    return {
        name: int(((value == 0) & (before[name] != 0)).sum())
        for name, value in pruned.named_parameters()
        if ".layers." in name and value.dim() == 2
    }


def assert_own_figures(folder: Path, bench: Bench) -> None:
    """Assert that a run's own-text metrics are those of models loaded by plain transformers.

    The held-out passages are found here by their hashes.
    """
    models = {"dense": bench.model, "federated": folder / "model"}
    loaded = {
        name: AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, trust_remote_code=True
        )
        for name, path in models.items()
    }
    tokenizer = AutoTokenizer.from_pretrained(bench.model)
    document = summary(folder)
    expected = {name: list[float]() for name in models}
    for client in range(bench.num_clients):
        passages = [passage for passage in private_text(client).split("\n\n") if held_out(passage)]
        tokens = torch.tensor(tokenizer("\n\n".join(passages))["input_ids"])
        samples = tokens[: len(tokens) // 16 * 16].view(-1, 16)
        metrics = document["clients"][client]["metrics"]
        assert len(samples) > 0
        for name, model in loaded.items():
            with torch.no_grad():
                losses = [
                    model(input_ids=sample[None], labels=sample[None]).loss.item()
                    for sample in samples
                ]
            expected[name].append(float(np.exp(np.mean(losses))))
            assert metrics[f"perplexity/own-text/{name}"] == pytest.approx(
                expected[name][-1], rel=1e-3
            )
    (own,) = [metric for metric in document["metrics"] if metric["dataset"] == "own-text"]
    # No single party has the clients' own text, so there is no centralized value.
    assert own["values"]["centralized"] is None
    for name, values in expected.items():
        assert own["values"][name] == pytest.approx(np.mean(values), rel=1e-3)


class Promises(ContractPromises, FailurePromises, OrderPromises):
    """Promises of a method, one subclass per method.

    Tests that need no run of their own read one of the class's runs.
    """

    def test_exported_model_has_reported_perplexity(self, whole: Uninterrupted) -> None:
        text = whole.bench.public
        folder = whole.folder
        model = AutoModelForCausalLM.from_pretrained(
            folder / "model", dtype=torch.float32, trust_remote_code=True
        )
        tokens = torch.tensor(
            AutoTokenizer.from_pretrained(folder / "model")(text.read_text())["input_ids"]
        )
        samples = tokens[: len(tokens) // 16 * 16].view(-1, 16)
        with torch.no_grad():
            losses = [
                model(input_ids=sample[None], labels=sample[None]).loss.item() for sample in samples
            ]
        metric, _ = summary(folder)["metrics"]
        assert metric["values"]["federated"] == pytest.approx(
            float(np.exp(np.mean(losses))), rel=1e-4
        )

    def test_own_text_figures_equal_transformers(self, whole: Uninterrupted) -> None:
        assert_own_figures(whole.folder, whole.bench)

    def test_nothing_is_pushed_without_own_text(self, bench: Bench) -> None:
        grid = bench.grid(evaluation__local_baseline=True)
        folder = bench.run(grid, evaluation__local_baseline=True)
        replies = [read(reply.content) for _, reply in grid.received]
        kinds = [reply.header.kind for reply in replies]
        # Some methods need a push between rounds.
        after = replies[len(kinds) - kinds[::-1].index("train") :]
        brought = [reply.header.server_round for reply in after if reply.header.kind == "push"]
        # Pushes before ``result_round`` serve the client's own result.
        assert all(server_round < self.result_round for server_round in brought)
        assert all(
            reply.fields["own_losses"] == [] for reply in replies if reply.header.kind == "evaluate"
        )
        assert [metric["dataset"] for metric in summary(folder)["metrics"]] == ["public"]

    def test_too_little_own_text_is_told_early(self, on_own_text: Bench) -> None:
        held_back = [passage for passage in private_text(1).split("\n\n") if not held_out(passage)]
        (on_own_text.folder / "text-1.txt").write_text("\n\n".join(held_back))
        client = summary(on_own_text.run())["clients"][1]
        assert client["status"] == "dropped"
        assert client["reason"].startswith(
            "train: evaluation.own-text: the client's held-out text has fewer than"
        )

    def test_a_mean_over_few_words_never_leaves(
        self, on_own_text: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("espalier.data.client_text.MIN_PREDICTIONS", 1000)
        with pytest.raises(
            RunFailed,
            match="gives fewer than 1000 predictions, and their mean would reveal too much",
        ):
            on_own_text.run()

    def model_at_a_site(self, bench: Bench) -> dict[str, Any]:
        """Return the settings of a node for the model that a real site uses."""
        return {"model-path": str(bench.model)}

    def test_site_may_refuse_own_text_evaluation(self, on_own_text: Bench) -> None:
        grid = on_own_text.grid()
        for client, context in enumerate(grid.contexts.values()):
            context.node_config |= {
                "site": f"site-{client}",
                "own-text": client != 1,
                "min-tokens": 30,
                **self.model_at_a_site(on_own_text),
            }
        grid.simulated = False
        document = summary(on_own_text.run(grid))
        assert "this site does not allow it" in document["refused"]["site-1"]
        clients = {client["site"]: client["status"] for client in document["clients"]}
        assert clients == {f"site-{client}": "completed" for client in (0, 2, 3)}

    def test_unpushed_result_costs_figures_alone(self, on_own_text: Bench) -> None:
        def refuse(request: Message, reply: Message) -> Message | None:
            header = read(request.content).header
            return (
                None
                if header.kind == "push" and header.server_round >= self.result_round
                else reply
            )

        grid = on_own_text.grid()
        grid.tamper[2] = refuse
        document = summary(on_own_text.run(grid))
        assert document["status"] == "completed"
        given = [
            "perplexity/own-text/federated" in client["metrics"] for client in document["clients"]
        ]
        assert given == [True, True, False, True]
        assert document["clients"][2]["reason"].startswith("push: no reply before the deadline")
        # The client's votes are part of the model.
        assert document["clients"][2]["status"] == "completed"

    def test_finished_simulation_leaves_no_state(self, whole: Uninterrupted) -> None:
        lineage = json.loads((whole.folder / "run.json").read_text())["lineage"]
        assert not list((whole.bench.folder / "state").rglob(f"*{lineage}*"))


class PruningPromises(Promises):
    """Promises of methods that set weights to zero."""

    cuts_samples = "calibration_samples"

    def expected_sparsity(self, model: OpenedModel) -> float:
        """Return the sparsity that the settings demand, computed by hand."""
        raise NotImplementedError

    def test_exact_sparsity(self, plain: Uninterrupted) -> None:
        folder = plain.folder
        bench = plain.bench
        expected = self.expected_sparsity(OpenedModel(bench.model))
        assert summary(folder)["sparsity"]["achieved"] == pytest.approx(expected, abs=1e-12)
        written, dense = (
            AutoModelForCausalLM.from_pretrained(path) for path in (folder / "model", bench.model)
        )
        zeros = sum(count_zeros(written, dense).values())
        assert zeros / OpenedModel(bench.model).plan.num_weights == pytest.approx(
            expected, abs=1e-12
        )
