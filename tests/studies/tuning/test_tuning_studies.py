"""Studies of tuning train as the app does, resume after a stop, and report what they measured."""

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.reporting.rows import Rows
from benchmarks.tuning import studies
from benchmarks.tuning.federation import Averaging, Federation
from benchmarks.tuning.report import Table, cells_of, write_report
from benchmarks.tuning.studies import FIGURES, KEYS, STUDIES, Bench, first_records
from espalier.errors import EspalierError
from espalier.hf.machine.computing import set_up
from espalier.hf.opening.opened_model import open_model
from espalier.settings.run import parse
from tests.bench import EVALUATED
from tests.bench import Bench as Federated
from tests.tiny_model import WORDS, save_tiny_roberta

SMALL: dict[str, Any] = {
    **EVALUATED,
    "training.steps": 2,
    "training.batch-size": 2,
    "training.learning-rate": 0.02,
    "lora.rank": 4,
    "lora.alpha": 8.0,
    "task.name": "dolly",
    "task.max-tokens": 48,
    "task.max-test-tokens": 48,
    "task.max-test-items": 4,
    "data.source": "files",
    "evaluation.own-text": False,
}
TWO_ROUNDS = {"federation.rounds": 2}
CONDITIONS = {"model": {"name": "tiny", "parameters": 1}, "settings": {"rounds": 2}}
LIMITS = [1, 2, 4, 4]


def records(client: int, number: int = 30) -> list[dict[str, Any]]:
    """Return instructions that differ between clients; their first words imply a class."""
    made = []
    for place in range(number):
        words = [WORDS[(place * step + client) % len(WORDS)] for step in (1, 2, 3)]
        made.append({
            "instruction": f"{words[0]} {client} {place}", "context": "",
            "response": " ".join(words[1:]), "category": "qa",
            "sentence": f"{('fir', 'oak')[place % 2]} {' '.join(words)} {client} {place}",
            "label": place % 2,
        })  # fmt: skip
    return made


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return path


@pytest.fixture
def sites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Federated:
    """Four clients with a file each, of different lengths."""
    monkeypatch.setenv("ESPALIER_STATE_DIR", str(tmp_path / "state"))
    paths = {
        "data.path": str(tmp_path / "text-{client}.txt"),
        "task.test-path": str(tmp_path / "test.jsonl"),
    }
    made = Federated(tmp_path, "fedpetuning", SMALL | TWO_ROUNDS | paths)
    for client in range(4):
        write(tmp_path / f"text-{client}.txt", records(client, 20 + 5 * client))
    write(tmp_path / "test.jsonl", records(9))
    return made


def bench_of(sites: Federated, seeds: tuple[int, ...] = (0,), **changes: Any) -> Bench:
    config = sites.config(**changes)
    settings = parse(config)
    return Bench(open_model(settings.model), set_up(settings, sites.folder), config, seeds)


def written(folder: Path) -> list[torch.Tensor]:
    """Return the adapters and the head that a run of the app wrote, sorted by their numbers."""
    return by_numbers(load_file(folder / "adapter" / "adapter_model.safetensors").values())


def by_numbers(tensors: Any) -> list[torch.Tensor]:
    return sorted(tensors, key=lambda tensor: (tuple(tensor.shape), tensor.flatten().tolist()))


def all_of(tensors: Any) -> list[torch.Tensor]:
    return by_numbers(value for block in tensors.values() for value in block.values())


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a, b) for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("aggregation", ["factors", "svd"])
def test_a_federation_trains_what_the_app_trains(sites: Federated, aggregation: Any) -> None:
    run = sites.run(
        fedpetuning__aggregation=aggregation,
        evaluation__centralized="off",
        evaluation__local_baseline=False,
    )
    bench = bench_of(sites)
    with bench.federation(bench.settings(sites.config()["seed"])) as clients:
        found = clients.federated(Averaging("factors" if aggregation == "factors" else "updates"))
    assert same(all_of(found.tensors), written(run))


def test_encoder_federation_equals_the_app(sites: Federated) -> None:
    sites.model = save_tiny_roberta(sites.folder / "encoder")
    run = sites.run(
        task__name="sst2", evaluation__centralized="off", evaluation__local_baseline=False
    )
    bench = bench_of(sites, task__name="sst2")
    with bench.federation(bench.settings(0)) as clients:
        assert same(all_of(clients.federated(Averaging("factors")).tensors), written(run))


def test_alone_and_centralized_equal_the_app(sites: Federated) -> None:
    document = json.loads((sites.run() / "summary.json").read_text())
    (loss,) = [entry["values"] for entry in document["metrics"] if entry["name"] == "loss"]
    bench = bench_of(sites)
    with bench.federation(bench.settings(0)) as clients:
        # The state after the first round must not matter.
        clients.federated(Averaging("factors"))
        alone = [clients.score(clients.alone(client), bench.public)["loss"] for client in range(4)]
        centralized = clients.score(clients.centralized(), bench.public)["loss"]
        dense = clients.score(None, bench.public)["loss"]
    assert sum(alone) / 4 == pytest.approx(loss["local_baseline"], abs=6e-4)
    assert centralized == pytest.approx(loss["centralized"], rel=1e-5)
    assert dense == pytest.approx(loss["dense"], rel=1e-5)


@pytest.mark.parametrize(("aggregation", "of"), [("zero-pad", "factors"), ("svd", "updates")])
def test_different_ranks_are_hetlora_s(sites: Federated, aggregation: str, of: Any) -> None:
    settings = sites.settings
    sites.method = "hetlora"
    sites.settings = {
        key: value for key, value in settings.items() if not key.startswith("fedpetuning.")
    }
    rounds = {"federation__rounds": 2, "lora__ranks": "1,2,4", "hetlora__gamma": 1.0}
    run = sites.run(
        **rounds,
        hetlora__aggregation=aggregation,
        evaluation__centralized="off",
        evaluation__local_baseline=False,
    )
    sites.method = "fedpetuning"
    sites.settings = settings
    bench = bench_of(sites)
    with bench.federation(bench.settings(0), LIMITS) as clients:
        assert same(all_of(clients.federated(Averaging(of, "norms")).tensors), written(run))


def test_zero_padding_equals_slow_loop(sites: Federated) -> None:
    """Clients of ranks 1, 2, 4 and 4 send one round of updates.

    The loop pads them, weights them by norms and averages them element by element.
    """
    bench = bench_of(sites, federation__rounds=1)
    with bench.federation(bench.settings(0), LIMITS) as clients:
        # In a single round, the local baseline equals the client's update.
        sent = [clients.alone(client) for client in range(4)]
        found = clients.federated(Averaging("factors", "norms"))
        names = [
            (f"{key}", name)
            for key, block in found.tensors.items()
            for name in block
            if name.endswith("lora_a")
        ]
    pairs = [(key, name, name.replace("lora_a", "lora_b")) for key, name in names]
    norms = [
        math.sqrt(
            sum(
                float((2.0 * one[key][b].double() @ one[key][a].double()).norm()) ** 2
                for key, a, b in pairs
            )
        )
        for one in sent
    ]
    shares = [value / sum(norms) for value in norms]
    squares = dict.fromkeys(("exact", 1, 2, 4), 0.0)
    for key, a, b in pairs:
        mean_a = torch.zeros_like(found.tensors[key][a]).double()
        mean_b = torch.zeros_like(found.tensors[key][b]).double()
        exact = torch.zeros(len(mean_b), mean_a.shape[1], dtype=torch.float64)
        for share, rank, one in zip(shares, LIMITS, sent, strict=True):
            for row in range(rank):
                mean_a[row] += share * one[key][a][row]
                mean_b[:, row] += share * one[key][b][:, row]
            exact += share * 2.0 * one[key][b].double() @ one[key][a].double()
        torch.testing.assert_close(found.tensors[key][a].double(), mean_a, rtol=1e-5, atol=1e-8)
        torch.testing.assert_close(found.tensors[key][b].double(), mean_b, rtol=1e-5, atol=1e-8)
        squares["exact"] += float(exact.norm()) ** 2
        for limit in (1, 2, 4):
            squares[limit] += float((2.0 * mean_b[:, :limit] @ mean_a[:limit] - exact).norm()) ** 2
    distance = {limit: math.sqrt(squares[limit] / squares["exact"]) for limit in (1, 2, 4)}
    assert found.errors == [pytest.approx(distance[4], rel=1e-4)]
    assert found.errors_at_clients == [
        pytest.approx(sum(distance[rank] for rank in LIMITS) / 4, rel=1e-4)
    ]


def test_svd_is_never_further_from_mean(sites: Federated) -> None:
    bench = bench_of(sites, federation__rounds=1)
    with bench.federation(bench.settings(0), LIMITS) as clients:
        padded, cut = (clients.federated(Averaging(of, "norms")) for of in ("factors", "updates"))  # type: ignore[arg-type]
    assert cut.errors[0] < padded.errors[0]
    assert cut.errors_at_clients[0] < padded.errors_at_clients[0]


def test_a_rank_limit_takes_the_first_ranks(sites: Federated) -> None:
    """Adapters cut to rank 1 have the score of adapters whose further ranks are zero."""
    bench = bench_of(sites)
    with bench.federation(bench.settings(0), LIMITS) as clients:
        tensors = clients.federated(Averaging("factors", "norms")).tensors
        zeroed = {
            key: {name: value.clone() for name, value in block.items()}
            for key, block in tensors.items()
        }
        for block in zeroed.values():
            for name, value in block.items():
                (value if name.endswith("lora_a") else value.T)[1:] = 0
        cut = clients.score(tensors, bench.public, 1)["loss"]
        same_model = clients.score(zeroed, bench.public)["loss"]
    assert cut == pytest.approx(same_model, rel=1e-5)


def test_a_client_without_items_is_left_out(sites: Federated) -> None:
    (sites.folder / "text-1.txt").write_text("{}\n")
    bench = bench_of(sites)
    with bench.federation(bench.settings(0)) as clients:
        assert list(clients.sequences) == [0, 2, 3]
    for client in (0, 2, 3):
        (sites.folder / f"text-{client}.txt").write_text("{}\n")
    bench = bench_of(sites)
    with (
        pytest.raises(EspalierError, match="no client has items to train on"),
        bench.federation(bench.settings(0)),
    ):
        pytest.fail("a federation of nobody")


def test_only_float32_is_sent_without_messages(sites: Federated) -> None:
    settings = parse(sites.config(federation__wire_dtype="nf4"))
    with pytest.raises(ValueError, match="sends float32, not nf4"):
        Federation(
            settings, open_model(settings.model), set_up(settings, sites.folder), sites.folder
        )


@pytest.mark.parametrize("name", sorted(STUDIES))
def test_every_study_measures_goes_on_and_reports(
    sites: Federated, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(studies, "RANK", 2)
    monkeypatch.setattr(studies, "RANKS", (1, 2, 4, 4))
    monkeypatch.setattr(studies, "ALPHAS", (10.0, 0.5))
    changes: dict[str, Any] = {}
    if name == "encoder":
        sites.model = save_tiny_roberta(sites.folder / "encoder")
        shared = write(
            sites.folder / "shared.jsonl",
            [record for client in range(4) for record in records(client)],
        )
        changes = {"task__name": "sst2", "data__path": str(shared), "data__partition": "dirichlet"}
    bench = bench_of(sites, **changes)
    study = STUDIES[name]
    path = sites.folder / "out" / f"tuning-{name}"
    rows = Rows(path.with_suffix(".csv"), KEYS, FIGURES, CONDITIONS)
    study.work(bench, rows)
    whole = path.with_suffix(".csv").read_text()
    lines = whole.splitlines(keepends=True)
    path.with_suffix(".csv").write_text("".join(lines[:-2]))
    rows = Rows(path.with_suffix(".csv"), KEYS, FIGURES, CONDITIONS)
    study.work(bench, rows)
    assert path.with_suffix(".csv").read_text() == whole
    write_report(study.title, study.tables, rows, CONDITIONS, path)
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert (
        path.with_suffix(".md")
        .read_text()
        .startswith(f"# {study.title}\n\nMean ± sample standard deviation over 1 seeds.")
    )
    with open(path.with_suffix(".csv"), newline="") as file:
        assert all(math.isfinite(float(row["value"])) for row in csv.DictReader(file))


def test_a_table_shows_mean_and_spread(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "study.csv", KEYS, FIGURES, CONDITIONS)
    for seed, value in enumerate((1.0, 2.0, 6.0)):
        rows.add({"seed": seed, "setting": "dense", "test": "0", "measure": "loss"}, value=value)
    rows.add({"seed": 0, "setting": "dense", "test": "1", "measure": "error"}, value=9.0)
    panel = Table("loss", "setting", "test", "loss in nats")
    assert cells_of(panel, rows) == ({("dense", "0"): [1.0, 2.0, 6.0]}, ["dense"], ["0"])
    write_report("A title", [panel], rows, CONDITIONS, tmp_path / "study")
    # The standard deviation is sqrt((4 + 1 + 9) / 2).
    assert "| dense | 3.000 ± 2.646 |" in (tmp_path / "study.md").read_text()


def test_first_records_are_each_client_s_own(tmp_path: Path) -> None:
    files = [write(tmp_path / f"client_{client}.jsonl", records(client)) for client in range(2)]
    out = tmp_path / "out"
    out.mkdir()
    path = first_records(files, 3, out)
    assert Path(path.replace("{client}", "1")).read_text() == "".join(
        f"{json.dumps(r)}\n" for r in records(1)[:3]
    )
    first_records(files, 0, out)
    assert (out / "0.jsonl").read_bytes() == files[0].read_bytes()


def text() -> str:
    """Return passages in which the second word of a pair follows from the first."""
    return "\n\n".join(
        " ".join(f"{WORDS[(place + n) % 6]} {WORDS[(place + n) % 6 + 6]}" for n in range(12))
        + f" {place}"
        for place in range(60)
    )
