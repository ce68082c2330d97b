"""Layer sampling of FedSpaLLM, capabilities and schedules."""

from pathlib import Path

import pytest

from espalier.errors import EspalierError
from espalier.hf.opening.opened_model import OpenedModel
from espalier.messages.records import read
from espalier.methods.pruning.fedspallm import sparsity_of
from espalier.settings.run import parse
from tests.bench import Bench, results, summary
from tests.methods.promises.federations import silent_after_enrolment
from tests.methods.pruning.fedspallm.fedspallm_runs import exact


class TestSampling:
    """Samples that do not cover all layers, and clients that die with their layers."""

    @pytest.fixture
    def bench(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
        monkeypatch.setenv("ESPALIER_STATE_DIR", str(tmp_path / "state"))
        monkeypatch.setattr("espalier.data.client_text.MIN_PREDICTIONS", 15)
        return Bench(tmp_path, "fedspallm", {"fedspallm.sampled-layers": 0.5}, num_clients=1)

    def test_too_few_layer_places_are_refused(self, bench: Bench) -> None:
        with pytest.raises(
            EspalierError,
            match=r"prune 1 layer in a round, the model has 2 \(node-00000 1\); raise it",
        ):
            bench.run()

    def test_or_covered_over_rounds(self, bench: Bench) -> None:
        folder = bench.run(fedspallm__coverage="over-rounds")
        document = summary(folder)
        assert document["rounds"] == 2
        assert sorted(document["report"]["layer_versions"]) == [1, 2]
        assert document["sparsity"]["achieved"] == pytest.approx(
            exact(OpenedModel(bench.model), 0.5)
        )

    def test_layers_of_dead_client_are_pruned_later(self, tmp_path: Path, bench: Bench) -> None:
        """Two clients have one layer each; one of them never answers ``train``."""
        two = Bench(
            tmp_path / "two",
            "fedspallm",
            {"fedspallm.sampled-layers": 0.5, "quorum": 0.5},
            num_clients=2,
        )
        grid = two.grid()
        grid.tamper[1] = silent_after_enrolment
        document = summary(two.run(grid))
        assert [client["status"] for client in document["clients"]] == ["completed", "dropped"]
        assert sorted(document["report"]["layer_versions"]) == [1, 2]
        assert document["sparsity"]["achieved"] == pytest.approx(exact(OpenedModel(two.model), 0.5))

    def test_run_covering_over_rounds_resumes(self, bench: Bench) -> None:
        whole = bench.run(fedspallm__coverage="over-rounds")
        cut = bench.killed(
            lambda header: header.server_round == 2, fedspallm__coverage="over-rounds"
        )
        resumed = bench.run(fedspallm__coverage="over-rounds", resume_from=str(cut))
        assert results(resumed) == results(whole)

    def test_capability_is_stated_or_measured(self, bench: Bench) -> None:
        for stated in (3.0, 0.0):
            grid = bench.grid(fedspallm__coverage="over-rounds")
            seen = []
            for context in grid.contexts.values():
                context.node_config["capability"] = stated
            bench.run(grid, fedspallm__coverage="over-rounds")
            seen = [
                read(reply.content).fields
                for _, reply in grid.received
                if read(reply.content).header.kind == "enrol"
            ]
            assert [entry["measured"] for entry in seen] == [stated == 0]
            assert seen[0]["capability"] == 3.0 or stated == 0 < seen[0]["capability"]

    def test_mixed_capability_sources_are_refused(self, tmp_path: Path, bench: Bench) -> None:
        two = Bench(tmp_path / "two", "fedspallm", {}, num_clients=2)
        grid = two.grid()
        next(iter(grid.contexts.values())).node_config["capability"] = 0.0
        with pytest.raises(
            EspalierError, match="capability: node-00000 measured its own, others state theirs"
        ):
            two.run(grid)


@pytest.mark.parametrize("value", ["1,x", "0", "-1,2", "nan"])
def test_non_positive_capabilities_are_refused(value: str) -> None:
    with pytest.raises(EspalierError, match=r"fedspallm\.capabilities"):
        parse({"method": "fedspallm", "fedspallm.capabilities": value})


def test_schedules_by_hand() -> None:
    """Schedules of four rounds that end at 80% sparsity."""
    common = {"method": "fedspallm", "federation.rounds": 4, "pruning.sparsity": 0.8}
    jobs = {
        name: parse({**common, "fedspallm.schedule": name})
        for name in ("constant", "linear", "cubic")
    }
    found = {
        name: [round(sparsity_of(job, r), 10) for r in (1, 2, 3, 4, 5)]
        for name, job in jobs.items()
    }
    assert found["constant"] == [0.8] * 5
    assert found["linear"] == [0.2, 0.4, 0.6, 0.8, 0.8]
    assert found["cubic"] == [0.4625, 0.7, 0.7875, 0.8, 0.8]
