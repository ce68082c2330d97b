"""FedPrLLM keeps the promises, and votes as the paper says."""

import json
from collections import Counter
from typing import Any, ClassVar

import numpy as np
import pytest
from bench import Bench, summary
from promises import Promises
from safetensors import safe_open
from safetensors.numpy import load

from espalier.modeling.opened import OpenedModel
from espalier.settings.mistakes import Mistake
from espalier.wire.messages import read


class TestFedPrLLM(Promises):
    method = "fedprllm"
    settings: ClassVar[dict[str, Any]] = {"fedprllm.sparsity": 0.5}
    last_round = 1

    def expected_sparsity(self, model: OpenedModel) -> float:
        shapes = [linear.shape for block in model.plan.blocks for linear in block.linears]
        return sum(int(rows * columns * 0.5) for rows, columns in shapes) / sum(rows * columns for rows, columns in shapes)

    def test_masks_are_those_of_a_slow_count_of_the_votes(self, bench: Bench) -> None:
        """Layer comparison: most votes first, then the smaller magnitude, then the lower index, one weight at a time."""
        grid = bench.grid()
        folder = bench.run(grid)
        model = OpenedModel(bench.model)
        votes: Counter[tuple[str, str, int]] = Counter()
        for _, reply in grid.received:
            for key, blob in read(reply.content).blobs.items():
                for name, words in load(blob).items():
                    for word_index, word in enumerate(words):
                        for bit in range(64):
                            votes[key, name, word_index * 64 + bit] += int(word) >> bit & 1
        with safe_open(folder / "masks.safetensors", "np") as masks:
            for block in model.plan.blocks:
                for linear in block.linears:
                    weight = model.checkpoint.read(linear.parameter).float().abs().flatten().tolist()
                    count = [votes[f"block-{block.index:04d}", f"{linear.name}.prune_mask", i] for i in range(len(weight))]
                    order = sorted(range(len(weight)), key=lambda i: (-count[i], weight[i], i))
                    expected = set(order[: int(len(weight) * 0.5)])
                    words = masks.get_tensor(linear.parameter)
                    assert {i for i in range(len(weight)) if int(words[i // 64]) >> (i % 64) & 1} == expected

    def test_row_comparison_prunes_every_row_alike(self, bench: Bench) -> None:
        folder = bench.run(fedprllm__comparison_group="row", fedprllm__sparsity=0.3)
        with safe_open(folder / "model" / "model.safetensors", "pt") as model:
            for linear in OpenedModel(bench.model).plan.blocks[1].linears:
                zeros = (model.get_tensor(linear.parameter) == 0).sum(dim=1)
                assert set(zeros.tolist()) == {int(linear.shape[1] * 0.3)}

    def test_magnitude_needs_no_data_so_centralized_equals_federated_and_local_only(self, bench: Bench) -> None:
        values = summary(bench.run(fedprllm__local_metric="magnitude"))["metrics"][0]["values"]
        assert values["centralized"] == values["local_only"] == pytest.approx(values["federated"], rel=1e-12)

    def test_ledger_counts_every_byte_of_the_masks(self, bench: Bench) -> None:
        folder = bench.run()
        entries = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
        plan = OpenedModel(bench.model).plan
        masks = sum(
            -(-rows * columns // 64) * 8
            for block in plan.blocks
            for rows, columns in (linear.shape for linear in block.linears)
        )
        for client in range(bench.num_clients):
            raw = [e["raw_bytes"] for e in entries if e["rank"] == client and e["direction"] == "up" and e["block"]]
            assert sum(raw) == masks
        up = [entry["wire_bytes"] for entry in entries if entry["rank"] >= 0 and entry["direction"] == "up"]
        assert sum(up) == summary(folder)["bytes_up"]

    def test_a_site_with_too_little_text_says_so_in_numbers(self, bench: Bench) -> None:
        (bench.folder / "text-3.txt").write_text("hawthorn hedge")
        client = summary(bench.run())["clients"][3]
        assert client["status"] == "dropped"
        assert "gives 0 windows of 16 tokens, data.windows = 2 are needed" in client["reason"]
        assert "hawthorn" not in client["reason"]

    def test_a_site_with_another_model_is_refused(self, bench: Bench) -> None:
        from tiny_model import save_tiny_llama

        other = save_tiny_llama(bench.folder / "other", seed=1)
        grid = bench.grid()
        for context in grid.contexts.values():
            if context.node_config["partition-id"] == 1:
                context.node_config["model-path"] = str(other)
        document = summary(bench.run(grid))
        assert [client["site"] for client in document["clients"]] == ["node-00000", "node-00002", "node-00003"]
        assert "has another base model" in document["refused"]["node-00001"]

    def test_two_nodes_of_one_site_are_one_client(self, bench: Bench) -> None:
        grid = bench.grid()
        grid.connect(next(iter(grid.contexts.values())).node_config, bench.config())
        document = summary(bench.run(grid))
        assert len(document["clients"]) == bench.num_clients
        assert "a second node with this site name" in document["refused"]["node-00000"]

    def test_a_returning_site_is_found_under_its_new_node_id(self, bench: Bench) -> None:
        """The node vanishes with its message; the site comes back as another node and is asked again."""
        grid = bench.grid()

        def restart(request, reply):
            if read(request.content).header.kind == "train" and request.metadata.dst_node_id in grid.contexts:
                old = grid.contexts.pop(request.metadata.dst_node_id)
                grid.contexts[5000] = type(old)(1, 5000, old.node_config, old.state, old.run_config)
                del grid.tamper[2]
                return None
            return reply

        grid.tamper[2] = restart
        folder = bench.run(grid)
        assert {client["status"] for client in summary(folder)["clients"]} == {"completed"}

    def test_resume_refuses_other_settings_and_completed_runs(self, bench: Bench) -> None:
        folder = bench.run()
        with pytest.raises(Mistake, match="that run is completed"):
            bench.run(resume_from=str(folder))
        (folder / "summary.json").unlink()
        with pytest.raises(Mistake, match="settings is not that of"):
            bench.run(resume_from=str(folder), fedprllm__sparsity=0.6)
        with pytest.raises(Mistake, match="is not a run directory"):
            bench.run(resume_from=str(bench.folder))

    def test_private_state_is_for_its_owner_alone(self, bench: Bench) -> None:
        grid, seen = bench.grid(), []

        def look(message) -> None:
            if read(message.content).header.kind == "evaluate":
                state = bench.folder / "state"
                seen.extend(path.stat().st_mode & 0o077 for path in (state, *state.rglob("r001/*"), *state.glob("*/*")))

        grid.before_push = look
        bench.run(grid)
        assert seen
        assert set(seen) == {0}


def test_vote_by_hand() -> None:
    """Three clients on a 2x3 matrix, half of it pruned, checked on paper.

    votes   3 1 2    above the threshold 2: only (0, 0); on it: (0, 2), (1, 0) and (1, 1) compete for two places;
            2 2 0    |W| = 5, 4 and 9 there, so (1, 0) and (0, 2) go.
    """
    from pruning_kernels.bitmask import pack
    from pruning_kernels.votes import VoteCounter, select_most_voted

    clients = [[[1, 0, 1], [1, 0, 0]], [[1, 1, 0], [0, 1, 0]], [[1, 0, 1], [1, 1, 0]]]
    counter = VoteCounter(6)
    for mask in clients:
        counter.add(pack(np.array(mask, dtype=bool)))
    counts = counter.counts().reshape(2, 3)
    assert counts.tolist() == [[3, 1, 2], [2, 2, 0]]
    weight = np.array([[1.0, 2.0, 5.0], [4.0, 9.0, 3.0]])
    assert select_most_voted(counts, 0.5, "layer", weight).astype(int).tolist() == [[1, 0, 1], [1, 0, 0]]
