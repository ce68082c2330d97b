"""Settings of FedSpine: its variants, its plans, and combinations that are refused."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from espalier.errors import EspalierError
from espalier.methods.tuning.fedspine import FedSpineSettings
from espalier.settings.tables.federation import FederationSettings
from tests.bench import Bench, Home, summary
from tests.methods.promises.contracts import assert_planned
from tests.methods.tuning.fedspine.fedspine_runs import FedSpineRuns
from tests.tiny_model import WORDS, save_tiny_llama, save_tiny_roberta


class TestFedSpine(FedSpineRuns):
    @pytest.mark.parametrize(
        "changes",
        [
            {
                "fedspine__arm_space": "absolute",
                "fedspine__reward": "literal",
                "federation__rounds": 3,
            },
            pytest.param(
                {
                    "fedspine__score": "group",
                    "fedspine__normalise": False,
                    "federation__wire_dtype": "bfloat16",
                },
                marks=pytest.mark.slow,
            ),
            {
                "federation__wire_dtype": "nf4",
                "pruning__selection": "block",
                "federation__client_weights": "importance-samples",
            },
            pytest.param(
                {
                    "federation__fleet": "measured",
                    "federation__client_weights": "equal",
                    "federation__sampled_clients": 0.5,
                },
                marks=pytest.mark.slow,
            ),
        ],
    )
    def test_other_ways_work(self, bench: Bench, changes: dict[str, Any]) -> None:
        assert {client["status"] for client in summary(bench.run(**changes))["clients"]} == {
            "completed"
        }

    def test_a_run_tells_that_its_bandits_have_too_few_rounds(
        self, bench: Bench, capsys: pytest.CaptureFixture[str]
    ) -> None:
        bench.run()
        assert "chosen by bandit (no better than chance in 2 rounds)" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("rounds", "changes", "expected"),
        [
            (16, {}, True),
            (17, {}, False),
            (2, {"fedspine.allocation": "fixed"}, False),
            (2, {"fedspine.adaptive-pruning": False}, True),
            (2, {"fedspine.adaptive-pruning": False, "fedspine.adaptive-rank": False}, False),
        ],
    )
    def test_fifteen_choices_teach_nothing(
        self, rounds: int, changes: dict[str, Any], expected: bool
    ) -> None:
        """Nothing is chosen in round 1."""
        flat = {name.partition(".")[2]: value for name, value in changes.items()}
        job = FedSpineSettings.model_validate(flat)
        federation = FederationSettings.model_validate({"rounds": rounds})
        assert job.learns_nothing(federation) is expected
        half = FederationSettings.model_validate({"rounds": 31, "sampled-clients": 0.5})
        assert job.learns_nothing(half) is (expected or rounds == 17)

    def test_devices_score_their_models_on_task_items(self, bench: Bench) -> None:
        """Devices evaluate their own models on the server's items.

        On their own items they also evaluate the dense model.
        """
        generator = random.Random(0)

        def reviews(number: int) -> str:
            labelled = (
                (" ".join(generator.choices(WORDS, k=4)), generator.randrange(2))
                for _ in range(number)
            )
            return "".join(
                json.dumps({"sentence": words, "label": label}) + "\n" for words, label in labelled
            )

        for client in range(bench.num_clients):
            (bench.folder / f"items-{client}.jsonl").write_text(reviews(40))
        (bench.folder / "tests.jsonl").write_text(reviews(12))
        changes = {
            "task__name": "sst2",
            "task__max_tokens": 48,
            "task__test_path": str(bench.folder / "tests.jsonl"),
            "data__source": "files",
            "data__path": str(bench.folder / "items-{client}.jsonl"),
            "evaluation__local_baseline": True,
            "evaluation__every": 2,
        }
        grid = bench.grid(**changes)
        for context in grid.contexts.values():
            context.node_config.pop("data-path")
        folder = bench.run(grid, **changes)
        document, (look,) = (
            summary(folder),
            json.loads((folder / "rounds.json").read_text())["rounds"],
        )
        found = {
            metric["name"]: metric["values"]
            for metric in document["metrics"]
            if metric["dataset"] == "sst2"
        }
        told = [client["metrics"]["acc/sst2"] for client in document["clients"]]
        assert found["acc"]["federated"] == pytest.approx(np.mean(told), abs=1e-3)
        assert found["acc"]["dense"] is not None
        assert list(look["scores"]["acc"].values()) == pytest.approx(told, abs=1e-3)

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            (
                {"lora__targets": "attn.q,attn.v"},
                "measures channels by adapters that lie on them, and block 0 has none on mlp",
            ),
            (
                {"lora__targets": "attn.o,mlp.up"},
                r"score = 'mask' needs an adapter on attn.q, attn.k, attn.v of the first block",
            ),
            (
                {"lora__layers": "1"},
                "measures groups by adapters that lie on them, and block 0 has none",
            ),
            ({"pruning__ratio": 0.8}, r"pruning.ratio = 0.8"),
            ({"federation__rounds": 1}, "fedspine prunes from round 2 on"),
            ({"lora__merge": True}, "clients of fedspine end with models of different shapes"),
            ({"fedspine__rank": 5}, "fedspine.rank = 5: the adapters' largest rank is 4"),
            (
                {"fedspine__adaptive_rank": False, "fedspine__adaptive_pruning": False},
                "neither ratio nor rank is chosen",
            ),
            (
                {"fedspine__adaptive_rank": False, "pruning__ratio": 0.0},
                "neither ratio nor rank is chosen",
            ),
            (
                {"fedspine__reward": "literal", "pruning__ratio": 0.0},
                "all rewards would be 0",
            ),
            (
                {"fedspine__allocation": "fixed", "fedspine__prune_rounds": 50},
                "and no device reaches the pruning ratio",
            ),
            (
                {"fedspine__allocation": "fixed", "fedspine__prune_from": 50},
                "fedspine.prune-rounds = 0, which is",
            ),
            (
                {"fedspine__adaptive_pruning": False, "fedspine__prune_rounds": 2},
                "pruning would end in round 3 of 2",
            ),
            (
                {"fedspine__prune_from": 3},
                "fedspine.prune-from = 3: where ratios are chosen pruning begins in round 2",
            ),
            (
                {"fedspine__prune_rounds": 3},
                "not even the largest arms reach the pruning ratio; lower it to 2 or less",
            ),
            (
                {"pruning__channel_multiple": 16, "pruning__ratio": 0.45},
                r"16 channels \(channel-multiple\) of each block",
            ),
            ({"federation__fleet": ""}, "federation.fleet = ''"),
            (
                {"federation__fleet": "none.toml"},
                (
                    "federation.fleet = 'none.toml': there is no none.toml;"
                    " see conf/devices for examples"
                ),
            ),
            (
                {"federation__fleet": "a" * 300},
                f"federation.fleet = '{'a' * 300}': .* cannot be read: File name too long",
            ),
            (
                {"training__steps": 1},
                (
                    "training.steps = 1: a bandit learns from how far the loss falls within a"
                    " round; set it to 2"
                ),
            ),
            ({"training__base": "nf4"}, "has 16 input features, which is not a multiple of 64"),
        ],
    )
    def test_incompatible_settings_are_refused_early(
        self, bench: Bench, changes: dict[str, Any], words: str
    ) -> None:
        with pytest.raises(EspalierError, match=words):
            bench.run(bench.grid(), **changes)
        assert not (bench.folder / "runs").exists()

    @pytest.mark.parametrize(
        "changes",
        [
            {
                "pruning__selection": "block",
                "pruning__ratio": 0.3,
                "federation__rounds": 3,
            },
            pytest.param(
                {
                    "pruning__selection": "global",
                    "fedspine__adaptive_pruning": False,
                    "federation__rounds": 4,
                },
                marks=pytest.mark.slow,
            ),
            pytest.param(
                {
                    "fedspine__allocation": "fixed",
                    "pruning__ratio": 0.1,
                    "fedspine__prune_rounds": 3,
                    "federation__rounds": 4,
                },
                marks=pytest.mark.slow,
            ),
            {
                "fedspine__allocation": "fixed",
                "pruning__channel_multiple": 5,
                "federation__rounds": 4,
            },
        ],
        ids=[
            "units of a block compete",
            "all compete, ranks are chosen",
            "steps below a unit",
            "multiples of channels",
        ],
    )
    def test_plans_of_other_cuts_equal_their_runs(
        self, bench: Bench, changes: dict[str, Any]
    ) -> None:
        """The server does not ask for a step that previous cuts already cover."""
        assert_planned(bench, bench.run(**changes), **changes)

    @pytest.mark.parametrize("selection", ["global", pytest.param("block", marks=pytest.mark.slow)])
    def test_plan_bounds_hold_for_uneven_parts(
        self, home: Home, tmp_path: Path, selection: str
    ) -> None:
        """Blocks lose different numbers of groups if all groups compete.

        Other blobs then share a part, and each part carries the bits of the cut.
        """
        changes = {
            "part_bytes": 97152, "lora__targets": "attn.v,mlp.down",
            "pruning__selection": selection, "pruning__ratio": 0.1,
            "fedspine__allocation": "fixed", "fedspine__prune_rounds": 1, "federation__rounds": 4,
        }  # fmt: skip
        wide = save_tiny_llama(tmp_path / "wide", blocks=8, feed_forward=4000)
        bench = Bench(
            tmp_path, self.method, self.settings, num_clients=2, home=Home(wide, home.public)
        )
        assert_planned(bench, bench.run(**changes), **changes)

    def test_changed_fleet_is_refused_on_resumption(self, bench: Bench) -> None:
        fleet = bench.folder / "fleet.toml"
        given = Path(__file__).parents[4] / "conf" / "devices"
        fleet.write_text((given / "low.toml").read_text())
        changes = {"federation__fleet": str(fleet)}
        folder = bench.killed(lambda header: header.server_round == 2, **changes)
        fleet.write_text((given / "high.toml").read_text())
        with pytest.raises(
            EspalierError, match="is not the fleet that the run began with; restore its file"
        ):
            bench.run(resume_from=str(folder), **changes)

    def test_simulation_beyond_its_fleet_is_refused(self, bench: Bench) -> None:
        with pytest.raises(
            EspalierError,
            match=r"'auto' \(in a simulation full\): num-clients = 81: the fleet has 80 devices",
        ):
            bench.run(num_clients=81)
        assert not (bench.folder / "runs").exists()

    def test_encoder_task_and_fleet_size_are_checked(self, bench: Bench) -> None:
        with pytest.raises(
            EspalierError,
            match=(
                r"task.name = 'text': an encoder only classifies;"
                r" choose sst2, mnli, boolq or class"
            ),
        ):
            bench.run(model=str(save_tiny_roberta(bench.folder / "encoder")))
        with pytest.raises(
            EspalierError,
            match=r"federation.fleet = 'low': num-clients = 11: the fleet has 10 devices",
        ):
            bench.run(num_clients=11, federation__fleet="low")
