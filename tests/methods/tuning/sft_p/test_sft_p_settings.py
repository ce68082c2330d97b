"""Settings of SFT-P: its variants, and combinations that are refused."""

import json
import math
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load

from client_app.methods.tuning.sft_p import own_target
from client_app.site import Site
from espalier.errors import EspalierError
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.structured.residual_gates import ResidualGates
from espalier.messages.message import SCHEMA_VERSION, Header
from espalier.messages.records import read
from espalier.settings.node import NodeSettings, simulated_node
from espalier.settings.run import parse
from tests.bench import Bench, Home, private_text, summary
from tests.methods.promises.contracts import assert_planned, outgoing_bytes
from tests.methods.promises.federations import Uninterrupted
from tests.methods.tuning.sft_p.sft_p_runs import SftPRuns, masks
from tests.run_names import BY_HAND
from tests.tiny_model import WORDS, save_tiny_llama


class TestSftP(SftPRuns):
    def test_without_adapters_masks_alone_travel(self, bench: Bench) -> None:
        grid = bench.grid(sft_p__adapters=False)
        folder = bench.run(grid, **{"sft_p__adapters": False})
        names = {
            name
            for _, reply in grid.received
            for blob in read(reply.content).blobs.values()
            for name in load(blob)
        }
        assert names
        assert all(name.startswith("mask.") for name in names)
        assert not (folder / "adapter").exists()

    def test_unconditioned_equal_budgets_share_a_mask(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("server_app.app._remove_private_state", lambda run: None)
        folder = bench.run(sft_p__conditioned=False, sft_p__ratios="0.3")
        run = Uninterrupted(bench, folder, [], [], "")
        settings = parse(bench.config(sft_p__conditioned=False, sft_p__ratios="0.3"))
        found = [masks(run, client, settings, 0.3) for client in range(4)]
        assert all(torch.equal(one[gate], found[0][gate]) for one in found for gate in one)

    @pytest.mark.parametrize(
        "changes",
        [
            {"sft_p__heads": "shared"},
            {"sft_p__estimator": "gumbel", "sft_p__tau": 0.4},
            {"sft_p__masks": "sign", "federation__sampled_clients": 0.5},
            {"sft_p__norm": "read", "evaluation__local_baseline": True},
        ],
    )
    def test_other_generators_work(self, bench: Bench, changes: dict[str, Any]) -> None:
        assert {
            client["status"]
            for client in summary(bench.run(bench.grid(**changes), **changes))["clients"]
        } == {"completed"}

    def test_budget_input_makes_masks_and_stays_at_clients(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Masks follow from embedding and budget, also those of a late client.

        No outgoing byte is of the budget, and the plan has the bytes of the larger generator.
        """
        monkeypatch.setattr("server_app.app._remove_private_state", lambda run: None)
        shares = (0.2173, 0.3191, 0.5173, 0.4673)
        changes = {
            "sft_p__budget_input": 10.0,
            "pruning__ratio": 0.3,
            "sft_p__ratios": ",".join(map(str, shares)),
            "sft_p__late_clients": 1,
            "sft_p__late_steps": 4,
            "evaluation__local_baseline": True,
        }
        grid = bench.grid(**changes)
        run = Uninterrupted(bench, bench.run(grid, **changes), [], [], "")
        settings = parse(bench.config(**changes))
        document = json.loads((run.folder / "masks.json").read_text())
        assert "3" in document["late"]
        blocks = range(len(OpenedModel(bench.model).plan.blocks))
        for client, share in enumerate(shares):
            budget = 10 * math.log((1 - share) / 0.7)
            found = masks(run, client, settings, share, budget)
            for kind, densities in document["density"][str(client)].items():
                expected = [float(found[block, kind].double().mean()) for block in blocks]
                assert densities == pytest.approx(expected)
            secrets = [str(share).encode()]
            secrets += [np.array(budget, kind).tobytes() for kind in (np.float32, np.float64)]
            assert not [
                secret
                for _, reply in grid.received
                for secret in secrets
                if secret in outgoing_bytes(reply)
            ]
        assert_planned(bench, run.folder, **changes)

    def test_resumed_run_with_budget_input_is_the_same(self, bench: Bench) -> None:
        changes = {
            "sft_p__budget_input": 10.0,
            "sft_p__embedding_deviation": 1.0,
        }
        folder = bench.killed(lambda header: header.server_round >= 1, **changes)
        assert summary(folder)["status"] == "failed"
        resumed = bench.run(bench.grid(**changes), resume_from=str(folder), **changes)
        shutil.rmtree(bench.folder / "state")
        whole = bench.run(bench.grid(**changes), **changes)
        assert resumed == folder
        name = "generator.safetensors"
        assert (resumed / name).read_bytes() == (whole / name).read_bytes()

    def test_clients_score_own_models_on_task_items(self, bench: Bench) -> None:
        """The server sends public items along.

        Clients also evaluate their own items, and compare with the dense model.
        """
        for client in range(bench.num_clients):
            (bench.folder / f"items-{client}.jsonl").write_text(reviews(40))
        (bench.folder / "tests.jsonl").write_text(reviews(12))
        changes = of_reviews(bench)
        grid = bench.grid(**changes)
        for context in grid.contexts.values():
            context.node_config.pop("data-path")
        document = summary(bench.run(grid, **changes))
        found = {
            metric["name"]: metric["values"]
            for metric in document["metrics"]
            if metric["dataset"] == "sst2"
        }
        told = [client["metrics"]["acc/sst2"] for client in document["clients"]]
        assert found["acc"]["federated"] == pytest.approx(np.mean(told), abs=1e-3)
        assert found["acc"]["dense"] is not None

    def test_nf4_clients_are_measured_on_task_items(self, tmp_path: Path) -> None:
        """The numbers of residual dimensions need not be multiples of NF4's block size."""
        pytest.importorskip("bitsandbytes")
        base = save_tiny_llama(tmp_path / "base", blocks=1, hidden=64, feed_forward=64)
        (tmp_path / "public.txt").write_text(private_text(99))
        bench = Bench(
            tmp_path,
            "sft-p",
            self.settings,
            num_clients=2,
            home=Home(base, tmp_path / "public.txt"),
        )
        for name, number in (("items-0", 40), ("items-1", 40), ("tests", 12)):
            (tmp_path / f"{name}.jsonl").write_text(reviews(number))
        changes = of_reviews(bench) | {"training__base": "nf4", "federation__rounds": 1}
        grid = bench.grid(**changes)
        for context in grid.contexts.values():
            context.node_config.pop("data-path")
        found = {
            metric["name"]: metric["values"]
            for metric in summary(bench.run(grid, **changes))["metrics"]
        }
        assert found["acc"]["federated"] is not None

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"sft_p__ratios": "0.2,,0.5"}, "'' is not a number"),
            ({"sft_p__ratios": ","}, "'' is not a number"),
            (
                {"sft_p__validation_samples": 2, "task__name": "sst2"},
                "validation-samples = 2: task.name = 'sst2' does not read it",
            ),
            ({"sft_p__ratios": "0.2,x"}, "'x' is not a number"),
            (
                {"sft_p__ratios": "0.2,0.99"},
                "'0.99' is not a number above 0 and up to 0.95",
            ),
            (
                {"sft_p__ratio_of": "model", "sft_p__ratios": "0.95"},
                r"pruning.ratio = 0.95 \(sft-p.ratio-of = 'model'\)",
            ),
            (
                {"sft_p__late_clients": 4},
                "late-clients = 4: of 4 clients none is left for the rounds",
            ),
            (
                {"sft_p__late_clients": 1, "sft_p__conditioned": False},
                "a late client has nothing to fit",
            ),
            (
                {"lora__merge": True},
                "lora.merge = true: clients of sft-p end with models of different shapes",
            ),
        ],
    )
    def test_incompatible_settings_are_refused_early(
        self, bench: Bench, changes: dict[str, Any], words: str
    ) -> None:
        with pytest.raises(EspalierError, match=words):
            bench.run(bench.grid(), **changes)
        assert not (bench.folder / "runs").exists()


def test_real_site_ignores_ratios_by_client() -> None:
    """Only simulated clients use the list of ratios by client number."""
    config = {"method": "sft-p", "pruning.ratio": 0.3, "sft-p.ratios": "0.5"}
    gates = ResidualGates(Site(config, NodeSettings()).model.plan)
    header = Header(
        schema_version=SCHEMA_VERSION, kind="train", method="sft-p", lineage=BY_HAND,
        server_round=1, client=0, attempt=1, part=0, num_parts=1,
    )  # fmt: skip
    assert own_target(Site(config, NodeSettings()), header) == gates.target(0.3, "blocks")
    assert own_target(Site(config, simulated_node()), header) == gates.target(0.5, "blocks")
    assert own_target(Site(config, NodeSettings(pruning_ratio=0.4)), header) == gates.target(
        0.4, "blocks"
    )


def reviews(number: int) -> str:
    """Return JSON Lines records with sentences and labels."""
    generator = random.Random(number)
    labelled = (
        (" ".join(generator.choices(WORDS, k=4)), generator.randrange(2)) for _ in range(number)
    )
    return "".join(
        json.dumps({"sentence": words, "label": label}) + "\n" for words, label in labelled
    )


def of_reviews(bench: Bench) -> dict[str, Any]:
    """Return the settings of a run on items in the bench's folder."""
    return {
        "task__name": "sst2",
        "task__max_tokens": 48,
        "task__test_path": str(bench.folder / "tests.jsonl"),
        "data__source": "files",
        "data__path": str(bench.folder / "items-{client}.jsonl"),
        "evaluation__local_baseline": True,
    }
