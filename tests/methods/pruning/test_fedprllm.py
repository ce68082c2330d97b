"""FedPrLLM: promises of every method, and votes as in the paper."""

import json
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from flwr.app import Message
from safetensors import safe_open
from safetensors.numpy import load

from espalier.errors import EspalierError
from espalier.hf.opening.opened_model import OpenedModel
from espalier.messages.records import read
from strategies.base.rounds import RunFailed
from tests.bench import EVALUATED, Bench, events, model_files, summary
from tests.methods.promises.federations import Uninterrupted
from tests.methods.promises.promises import PruningPromises, assert_own_figures
from tests.tiny_model import save_tiny_llama


class TestFedPrLLM(PruningPromises):
    method = "fedprllm"
    settings: ClassVar[dict[str, Any]] = {"pruning.sparsity": 0.5}
    last_round = 1

    def expected_sparsity(self, model: OpenedModel) -> float:
        shapes = [linear.shape for block in model.plan.blocks for linear in block.linears]
        return sum(int(rows * columns * 0.5) for rows, columns in shapes) / sum(
            rows * columns for rows, columns in shapes
        )

    def test_masks_equal_slow_vote_count(self, plain: Uninterrupted) -> None:
        """The order is: most votes, then smaller magnitude, then lower index.

        The layer is the comparison group; one weight is decided at a time.
        """
        model = OpenedModel(plain.bench.model)
        votes = votes_of(plain.received)
        with safe_open(plain.folder / "masks.safetensors", "np") as masks:
            for block in model.plan.blocks:
                for linear in block.linears:
                    weight = (
                        model.checkpoint.read(linear.parameter).float().abs().flatten().tolist()
                    )
                    count = [
                        votes[f"block-{block.index:04d}", f"{linear.name}.prune_mask", i]
                        for i in range(len(weight))
                    ]
                    order = sorted(range(len(weight)), key=lambda i: (-count[i], weight[i], i))
                    expected = set(order[: int(len(weight) * 0.5)])
                    words = masks.get_tensor(linear.parameter)
                    assert {
                        i for i in range(len(weight)) if int(words[i // 64]) >> (i % 64) & 1
                    } == expected

    def test_row_comparison_prunes_every_row_alike(self, bench: Bench) -> None:
        folder = bench.run(fedprllm__vote_group="row", pruning__sparsity=0.3)
        with safe_open(folder / "model" / "model.safetensors", "pt") as model:
            for linear in OpenedModel(bench.model).plan.blocks[1].linears:
                zeros = (model.get_tensor(linear.parameter) == 0).sum(dim=1)
                assert set(zeros.tolist()) == {int(linear.shape[1] * 0.3)}

    def test_magnitude_makes_all_baselines_equal(self, evaluated: Bench) -> None:
        values = summary(evaluated.run(pruning__metric="magnitude"))["metrics"][0]["values"]
        assert values["centralized"] == pytest.approx(values["federated"], rel=1e-12)
        # Clients round their losses.
        assert values["local_baseline"] == pytest.approx(values["federated"], rel=6e-4)

    def test_figures_on_own_text_with_weight_scaling(self, evaluated: Bench) -> None:
        assert_own_figures(evaluated.run(fedprllm__weight_scaling=True), evaluated)

    def test_single_client_baseline_equals_federated(self, tmp_path: Path, bench: Bench) -> None:
        alone = Bench(
            tmp_path / "local_baseline", self.method, bench.settings | EVALUATED, num_clients=1
        )
        for values in (metric["values"] for metric in summary(alone.run())["metrics"]):
            # Clients round their losses.
            assert values["local_baseline"] == pytest.approx(values["federated"], rel=6e-4)
            assert values["federated"] != values["dense"]

    def test_ledger_counts_every_byte_of_the_masks(self, whole: Uninterrupted) -> None:
        folder = whole.folder
        bench = whole.bench
        entries = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
        plan = OpenedModel(bench.model).plan
        masks = sum(
            -(-rows * columns // 64) * 8
            for block in plan.blocks
            for rows, columns in (linear.shape for linear in block.linears)
        )
        for client in range(bench.num_clients):
            raw = [
                e["raw_bytes"]
                for e in entries
                if e["client"] == client and e["direction"] == "up" and e["block"]
            ]
            assert sum(raw) == masks
        up = [
            entry["wire_bytes"]
            for entry in entries
            if entry["client"] >= 0 and entry["direction"] == "up"
        ]
        assert sum(up) == summary(folder)["bytes_up"]

    def test_too_little_text_is_refused_with_numbers(self, bench: Bench) -> None:
        (bench.folder / "text-3.txt").write_text("hawthorn hedge")
        document = summary(bench.run())
        assert [client["client"] for client in document["clients"]] == [0, 1, 2]
        (reason,) = document["refused"].values()
        assert "gives 0 samples of 16 tokens, but data.num-samples = 2 are needed" in reason
        assert "hawthorn" not in reason

    def test_a_site_with_another_model_is_refused(self, bench: Bench) -> None:
        other = save_tiny_llama(bench.folder / "other", seed=1)
        grid = bench.grid()
        for context in grid.contexts.values():
            if context.node_config["partition-id"] == 1:
                context.node_config["model-path"] = str(other)
        document = summary(bench.run(grid))
        assert [client["site"] for client in document["clients"]] == [
            "node-00000",
            "node-00002",
            "node-00003",
        ]
        assert "has another base model" in document["refused"]["node-00001"]

    def test_a_site_with_another_program_is_refused(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("strategies.base.federation.code_sha256", lambda: "0" * 64)
        with pytest.raises(RunFailed, match="0 clients enrolled"):
            bench.run()
        (folder,) = (bench.folder / "runs").iterdir()
        refused = summary(folder)["refused"]
        assert set(refused) == {f"node-{client:05d}" for client in range(bench.num_clients)}
        assert all("runs another version of the program" in reason for reason in refused.values())

    def test_unknown_setting_names_node_s_program(self, bench: Bench) -> None:
        grid = bench.grid()
        next(iter(grid.contexts.values())).run_config["fedprllm.of-the-future"] = 1
        refused = summary(bench.run(grid))["refused"]
        assert any(
            "of-the-future: unknown key" in reason and "runs program" in reason
            for reason in refused.values()
        )

    def test_simulated_deadline_restarts_at_any_reply(self, bench: Bench) -> None:
        """Replies arrive 3 s (30 polls) apart, as from one worker.

        The deadline is 5 s; the last reply comes after 12 s.
        """
        grid = bench.grid()
        grid.held = {0: 30, 1: 60, 2: 90, 3: 120}
        assert not [event for event in events(bench.run(grid)) if event["event"] == "sent_again"]

    def test_two_nodes_of_one_site_are_one_client(self, bench: Bench) -> None:
        grid = bench.grid()
        grid.connect(next(iter(grid.contexts.values())).node_config, bench.config())
        document = summary(bench.run(grid))
        assert len(document["clients"]) == bench.num_clients
        assert "a second node with this site name" in document["refused"]["node-00000"]

    def test_returning_site_is_found_as_a_new_node(self, bench: Bench) -> None:
        """The node and its message vanish.

        The site returns as another node and gets the message again.
        """
        grid = bench.grid()

        def restart(request, reply):
            if (
                read(request.content).header.kind == "train"
                and request.metadata.dst_node_id in grid.contexts
            ):
                old = grid.contexts.pop(request.metadata.dst_node_id)
                grid.contexts[5000] = type(old)(1, 5000, old.node_config, old.state, old.run_config)
                del grid.tamper[2]
                return None
            return reply

        grid.tamper[2] = restart
        folder = bench.run(grid)
        assert {client["status"] for client in summary(folder)["clients"]} == {"completed"}

    def test_returning_site_is_found_beside_old_node(self, bench: Bench) -> None:
        """Flower takes a minute to notice that a node is gone.

        The server asks the new node once the old one has missed its last attempt.
        """
        grid = bench.grid()
        old = 1000 - 7 * 2
        new: list[int] = []

        def restart(request, reply):
            if request.metadata.dst_node_id != old or read(request.content).header.kind == "enrol":
                return reply
            if not new:
                new.append(grid.connect(grid.contexts[old].node_config, bench.config()))
            return None

        grid.tamper[2] = restart
        folder = bench.run(grid)
        assert {client["status"] for client in summary(folder)["clients"]} == {"completed"}
        again = [
            event
            for event in events(folder)
            if event["event"] == "sent_again" and event["kind"] == "train"
        ]
        assert [(event["client"], event["reason"]) for event in again] == [
            (2, "no reply before the deadline")
        ] * 2

    def test_resume_refuses_changed_or_completed_runs(self, bench: Bench) -> None:
        folder = bench.run()
        with pytest.raises(EspalierError, match="the run is completed"):
            bench.run(resume_from=str(folder))
        (folder / "summary.json").unlink()
        with pytest.raises(EspalierError, match=r"pruning\.sparsity was 0\.5, is 0\.6"):
            bench.run(resume_from=str(folder), pruning__sparsity=0.6)
        with pytest.raises(EspalierError, match="is not a run directory"):
            bench.run(resume_from=str(bench.folder))

    def test_private_state_is_for_its_owner_alone(self, bench: Bench) -> None:
        bench.settings = bench.settings | EVALUATED
        grid = bench.grid()
        seen = []

        def look(message) -> None:
            if read(message.content).header.kind == "evaluate":
                state = bench.folder / "state"
                seen.extend(
                    path.stat().st_mode & 0o077
                    for path in (state, *state.rglob("r001/*"), *state.glob("*/*"))
                )

        grid.before_push = look
        bench.run(grid)
        assert seen
        assert set(seen) == {0}


class TestVariants:
    """Settings of the vote, each compared with its definition."""

    @pytest.fixture
    def bench(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
        monkeypatch.setenv("ESPALIER_STATE_DIR", str(tmp_path / "state"))
        return Bench(tmp_path, "fedprllm", {})

    def test_column_comparison_makes_all_masks_alike(self, bench: Bench) -> None:
        """Table 4: all weights of a column share one input norm, so all clients agree.

        Pooling the clients' data changes nothing either.
        """
        common = {
            "pruning__comparison_group": "column",
            "fedprllm__vote_group": "column",
        }
        wanda = bench.run(**common, evaluation__local_baseline=True, evaluation__centralized="auto")
        magnitude = bench.run(**common, pruning__metric="magnitude")
        values = summary(wanda)["metrics"][0]["values"]
        assert (
            values["centralized"]
            == values["federated"]
            == pytest.approx(values["local_baseline"], rel=6e-4)
        )
        assert (wanda / "masks.safetensors").read_bytes() == (
            magnitude / "masks.safetensors"
        ).read_bytes()

    def test_pattern_keeps_n_of_every_m(self, bench: Bench) -> None:
        folder = bench.run(pruning__pattern="1:4", pruning__metric="ria")
        with safe_open(folder / "model" / "model.safetensors", "pt") as model:
            for linear in OpenedModel(bench.model).plan.blocks[0].linears:
                zeros = (model.get_tensor(linear.parameter) == 0).reshape(-1, 4).sum(dim=1)
                assert set(zeros.tolist()) == {3}
        assert summary(folder)["sparsity"]["achieved"] == 0.75

    def test_incompatible_pattern_is_refused_early(self, bench: Bench) -> None:
        grid = bench.grid(pruning__pattern="3:5")
        with pytest.raises(
            EspalierError, match=r"pruning.pattern = '3:5': model.layers.0.self_attn.q_proj.weight"
        ):
            bench.run(grid, pruning__pattern="3:5")
        assert not grid.received

    def test_settings_of_other_methods_are_refused(self, bench: Bench) -> None:
        """A plain ``flwr run`` has only the merged configuration.

        There the user must have given every value that differs from its default.
        """
        with pytest.raises(
            EspalierError, match=r"pruning.ratio = 0.7: method = 'fedprllm' does not read it"
        ):
            bench.run(pruning__ratio=0.7)
        assert not (bench.folder / "runs").exists()

    def test_weight_scaling_uses_share_of_keepers(self, bench: Bench) -> None:
        grid = bench.grid(fedprllm__weight_scaling=True, fedprllm__vote_group="column")
        folder = bench.run(grid, fedprllm__weight_scaling=True, fedprllm__vote_group="column")
        votes = votes_of(grid.received)
        opened = OpenedModel(bench.model)
        survivors = 0
        with (
            safe_open(folder / "masks.safetensors", "np") as masks,
            safe_open(folder / "model" / "model.safetensors", "pt") as model,
        ):
            for block in opened.plan.blocks:
                for linear in block.linears:
                    dense = opened.checkpoint.read(linear.parameter).float().flatten().tolist()
                    written = model.get_tensor(linear.parameter).flatten()
                    words = masks.get_tensor(linear.parameter)
                    for i, weight in enumerate(dense):
                        pruned = int(words[i // 64]) >> (i % 64) & 1
                        count = votes[f"block-{block.index:04d}", f"{linear.name}.prune_mask", i]
                        survivors += not pruned and count == 4
                        expected = 0.0 if pruned else weight * (4 - count) / 4
                        assert written[i] == torch.tensor(expected, dtype=torch.float32).to(
                            torch.bfloat16
                        )
        document = summary(folder)
        assert survivors > 0
        assert document["report"]["unanimous_survivors"] == survivors
        total = opened.plan.num_weights
        assert document["sparsity"]["achieved"] == pytest.approx(
            document["sparsity"]["masked"] + survivors / total
        )

    def test_random_ties_depend_on_seed(self, bench: Bench) -> None:
        first, again = (bench.run(fedprllm__ties="random") for _ in range(2))
        other = bench.run(fedprllm__ties="index")
        assert model_files(first) == model_files(again)
        assert model_files(first) != model_files(other)


def votes_of(received: list[tuple[int, Message]]) -> Counter[tuple[str, str, int]]:
    """Return votes by (block, tensor, weight), counted from the replies bit by bit."""
    votes: Counter[tuple[str, str, int]] = Counter()
    for _, reply in received:
        for key, blob in read(reply.content).blobs.items():
            for name, words in load(blob).items():
                for word_index, word in enumerate(words):
                    for bit in range(64):
                        votes[key, name, word_index * 64 + bit] += int(word) >> bit & 1
    return votes


def test_vote_by_hand() -> None:
    r"""Three clients vote on a 2x3 matrix at 50% sparsity, checked on paper.

    votes   3 1 2    above the threshold 2: only (0, 0)
            2 2 0    at the threshold: (0, 2), (1, 0) and (1, 1) compete for two places

    \|W\| is 5, 4 and 9 there, so (1, 0) and (0, 2) are pruned.
    """
    from pruning_kernels.votes.bitmask import pack, unpack
    from pruning_kernels.votes.vote_counter import vote_counter
    from pruning_kernels.votes.votes import magnitudes

    clients = [[[1, 0, 1], [1, 0, 0]], [[1, 1, 0], [0, 1, 0]], [[1, 0, 1], [1, 1, 0]]]
    counter = vote_counter((2, 3), 3)
    counter.count(np.stack([pack(np.array(mask, dtype=bool)) for mask in clients]))
    assert counter.counts().tolist() == [[3, 1, 2], [2, 2, 0]]
    weight = torch.tensor([[1.0, 2.0, 5.0], [4.0, -9.0, 3.0]])
    pruned = unpack(counter.most_voted(0.5, "layer", magnitudes(weight)), (2, 3))
    assert pruned.astype(int).tolist() == [[1, 0, 1], [1, 0, 0]]
