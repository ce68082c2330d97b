"""FedSpaLLM's studies give the app's results, resume after a stop, and refuse foreign rows."""

import csv
from pathlib import Path

import pytest
import torch
from safetensors.torch import load

from benchmarks.fedspallm import studies
from benchmarks.fedspallm.clients import Clients
from benchmarks.fedspallm.studies import FOLDS, STUDIES, Bench
from benchmarks.reporting.perplexity_report import write_report
from benchmarks.reporting.rows import Rows
from espalier.data.public_text import public_samples
from espalier.errors import EspalierError
from espalier.hf.machine.computing import set_up
from espalier.hf.opening.opened_model import open_model
from espalier.hf.stream.block_stream import BlockStream
from espalier.settings.run import parse
from tests.bench import EVALUATED, model_files, private_text
from tests.bench import Bench as Federation

KEYS = ("seed", "text")
CONDITIONS = {
    "model": {"name": "tiny", "weights": 1},
    "samples": 2,
    "sequence_length": 16,
    "texts": {"public": {"samples": 2}},
}


@pytest.fixture
def sites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Federation:
    """Four clients that share one file."""
    monkeypatch.setenv("ESPALIER_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setattr("espalier.data.client_text.MIN_PREDICTIONS", 15)
    shared = tmp_path / "shared.txt"
    settings = EVALUATED | {
        "data.source": "files",
        "data.path": str(shared),
        "evaluation.own-text": False,
    }
    made = Federation(tmp_path, "fedspallm", settings)
    shared.write_text("\n\n".join(private_text(client) for client in range(4)))
    return made


def studied(sites: Federation) -> Bench:
    config = sites.config()
    settings = parse(config)
    model = open_model(settings.model)
    stream = BlockStream(model, set_up(settings, sites.folder))
    texts = public_samples(settings.evaluation, model.encode)
    return Bench(stream, texts, config, [Path(config["data.path"])], [0])


@pytest.mark.parametrize("fold", sorted(FOLDS))
def test_a_fold_is_what_the_app_gives(sites: Federation, fold: str) -> None:
    # Studies aggregate like the paper, without a limit on updates.
    unlimited = FOLDS[fold] | {"federation.max-update-ratio": 1e6}
    grid = sites.grid(**unlimited)
    for context in grid.contexts.values():
        del context.node_config["data-path"]
    folder = sites.run(grid, **unlimited)
    bench = studied(sites)
    clients = Clients(parse(sites.config()), bench.stream, sites.folder / "scratch")
    result = clients.fold(range(4), parse({**sites.config(), **FOLDS[fold]}))
    written = load(model_files(folder)["model/model.safetensors"])
    for block in bench.stream.model.plan.blocks:
        for linear in block.linears:
            assert torch.equal(
                written[linear.parameter], result.matrices(block.index)[linear.name].weight()
            )


def test_a_stopped_study_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "study.csv"
    rows = Rows(path, KEYS, ("perplexity",), CONDITIONS)
    rows.add({"seed": 0, "text": "public"}, perplexity=2.5)
    again = Rows(path, KEYS, ("perplexity",), CONDITIONS)
    cells = [{"seed": seed, "text": "public"} for seed in (0, 1)]
    assert again.missing(iter(cells)) == [cells[1]]
    with pytest.raises(EspalierError, match="other samples"):
        Rows(path, KEYS, ("perplexity",), {**CONDITIONS, "samples": 3})


def test_truncated_row_is_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "study.csv"
    rows = Rows(path, KEYS, ("perplexity",), CONDITIONS)
    rows.add({"seed": 0, "text": "public"}, perplexity=2.5)
    rows.add({"seed": 1, "text": "public"}, perplexity=2.5)
    path.write_text(path.read_text()[:-5])
    assert [row["seed"] for row in Rows(path, KEYS, ("perplexity",), CONDITIONS).rows] == ["0"]


@pytest.mark.parametrize("name", sorted(STUDIES))
def test_every_study_writes_its_tables_and_plot(
    sites: Federation, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for constant, value in (("FEDERATIONS", (1, 2)), ("SPARSITIES", (0.5,)), ("SAMPLES", 1)):
        monkeypatch.setattr(studies, constant, value)
    for constant, value in (
        ("SHARES", (0.5,)),
        ("PLANS", ((1, "constant"), (2, "linear"))),
        ("CLIENTS", 2),
    ):
        monkeypatch.setattr(studies, constant, value)
    bench = studied(sites)
    study = STUDIES[name]
    path = sites.folder / "out" / name
    rows = Rows(path.with_suffix(".csv"), study.keys, study.figures, CONDITIONS)
    study.work(bench, rows)
    write_report(study, rows, CONDITIONS, path)
    assert path.with_suffix(".png").stat().st_size > 1000
    with open(path.with_suffix(".csv"), newline="") as file:
        measured = list(csv.DictReader(file))
    assert measured
    text = path.with_suffix(".md").read_text()
    assert text.startswith(f"# {study.title}")
    assert "| 50% |" in text or "| 70% |" in text
    before = len(rows.rows)
    study.work(bench, rows)
    assert len(rows.rows) == before
