"""The same run in simulation and as real processes over gRPC gives the same bytes."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from deployment import Federation, espalier, federation

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
        ("fedpetuning.rounds=2", "training.steps=2", "lora.targets=all", "lora.merge=true", "part-bytes=400000"),
        ["enrol", "train", "fetch", "deliver", "train", "fetch", "alone", "evaluate"],
    ),
    "fedprllm": (("data.windows=2",), ["enrol", "train", "fetch", "fetch", "evaluate"]),
    "fedspallm": (
        ("fedspallm.rounds=2", "fedspallm.capabilities=1,2", "data.windows=2", "part-bytes=1500000"),
        ["enrol", "train", "fetch", "deliver", "deliver", "deliver", "train", "fetch", "evaluate"],
    ),
    "hetlora": (
        ("hetlora.rounds=2", "hetlora.ranks=2,8", "training.steps=2", "lora.merge=true"),
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


@pytest.mark.parametrize("method", sorted(METHODS))
def test_real_processes_give_the_bytes_of_the_simulation(tmp_path: Path, sites: Federation, method: str) -> None:
    more, expected_kinds = METHODS[method]
    words = ("run", "two-sites", f"method={method}", *SETTINGS, *more, "--app", str(ROOT))
    for way in ("simulated", "deployed"):
        (tmp_path / way).mkdir()
    with ThreadPoolExecutor() as pool:
        simulation = pool.submit(espalier, tmp_path / "simulated", *words)
        deployment = pool.submit(espalier, tmp_path / "deployed", *words, "--superlink", sites.control)
        for done in (simulation.result(), deployment.result()):
            assert done.returncode == 0, done.stdout + done.stderr
    simulated, deployed = (results_of(place / "runs", method) for place in (tmp_path / "simulated", sites.folder))

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
