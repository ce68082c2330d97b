"""The same run in simulation and as real processes over gRPC gives the same bytes."""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from deployment import Federation, espalier, federation
from flwr.app import Context, RecordDict
from in_process import FakeTime, InProcessGrid

import client_app.app
import server_app.app
from espalier.launch.configuration import configuration

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parent.parent.parent
SETTINGS = ("evaluation.max-windows=4", "part-bytes=150000")


def results_of(out_dir: Path, method: str) -> Path:
    (folder,) = out_dir.glob(f"*-{method}-*")
    return folder


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


METHODS = {
    "fedpetuning": (
        ("federation.rounds=2", "training.steps=2", "lora.targets=all", "lora.merge=true", "part-bytes=400000"),
        ["enrol", "train", "fetch", "deliver", "train", "fetch", "alone", "evaluate"],
    ),
    "fedprllm": (("data.windows=2",), ["enrol", "train", "fetch", "fetch", "evaluate"]),
    "fedspallm": (
        ("federation.rounds=2", "fedspallm.capabilities=1,2", "data.windows=2", "part-bytes=1500000"),
        ["enrol", "train", "fetch", "deliver", "deliver", "deliver", "train", "fetch", "evaluate"],
    ),
    "hetlora": (
        ("federation.rounds=2", "hetlora.ranks=2,8", "training.steps=2", "lora.merge=true"),
        ["enrol", "train", "train", "alone", "evaluate"],
    ),
}
"""Settings, and which messages leave the first site in what order."""


SITES = ("hospital-a", "hospital-b")


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """One SuperLink and two SuperNodes for all runs, as they are outside tests."""
    with federation(tmp_path_factory.mktemp("sites"), SITES) as started:
        yield started


def simulation(folder: Path, words: Sequence[str], *, by_the_command: bool) -> Path:
    """The run directory of a simulation: by the command, which starts Ray, or in this process, by the same handlers."""
    chosen = [*words, f"out-dir={folder / 'simulated'}"]
    if by_the_command:
        done = espalier(folder, "run", *chosen, "--app", str(ROOT))
        assert done.returncode == 0, done.stdout + done.stderr
    else:
        config, _ = configuration(ROOT, chosen, on_this_machine=True)
        grid = InProcessGrid(client_app.app.app, [{"partition-id": client, "num-partitions": 2} for client in range(2)], config)
        server_app.app.run_method(grid, Context(1, 0, {}, RecordDict(), config), FakeTime().clock())
    (found,) = (folder / "simulated").iterdir()
    return found


@pytest.mark.parametrize("method", sorted(METHODS))
def test_real_processes_give_the_bytes_of_the_simulation(tmp_path: Path, sites: Federation, method: str) -> None:
    more, expected_kinds = METHODS[method]
    words = ("two-sites", f"method={method}", *SETTINGS, *more)
    with ThreadPoolExecutor() as pool:
        command = ("run", *words, "--app", str(ROOT), "--superlink", sites.control)
        deployment = pool.submit(espalier, tmp_path, *command)
        simulated = simulation(tmp_path, words, by_the_command=method == "fedprllm")
        done = deployment.result()
    assert done.returncode == 0, done.stdout + done.stderr
    deployed = results_of(sites.folder / "runs", method)

    assert files(deployed / "model") == files(simulated / "model")
    for name in ("masks.safetensors", "adapter/adapter_model.safetensors"):
        assert [file.read_bytes() for file in deployed.glob(name)] == [file.read_bytes() for file in simulated.glob(name)]
    assert len([*deployed.glob("masks.safetensors"), *deployed.glob("adapter/adapter_model.safetensors")]) == 1
    summary = json.loads((deployed / "summary.json").read_text())
    assert summary["status"] == "completed"
    assert [client["site"] for client in summary["clients"]] == ["hospital-a", "hospital-b"]
    assert summary["metrics"][0]["values"]["centralized"] is None
    lineage = json.loads((deployed / "run.json").read_text())["lineage"]
    for name in SITES:
        log = sites.folder / name / "egress" / f"{lineage}-{name}.jsonl"
        kinds = [json.loads(line)["kind"] for line in log.read_text().splitlines()]
        assert kinds == expected_kinds if name == SITES[0] else kinds[:2] == ["enrol", "train"]


def test_pooled_data_is_refused_in_deployment(tmp_path: Path, sites: Federation) -> None:
    done = espalier(tmp_path, "run", "evaluation.centralized=on", "--app", str(ROOT), "--superlink", sites.control)
    assert done.returncode == 1
    assert "evaluation.centralized = 'on'" in done.stdout
    assert "simulation only" in done.stdout
