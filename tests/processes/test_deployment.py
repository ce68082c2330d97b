"""The same run in simulation and as real processes over gRPC gives the same bytes."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from deployment import espalier, federation

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parent.parent.parent
SETTINGS = ("evaluation.max-windows=4", "data.windows=2", "part-bytes=150000")


def results_of(out_dir: Path) -> Path:
    (folder,) = out_dir.iterdir()
    return folder


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


METHODS = {
    "fedpetuning": (
        ("fedpetuning.rounds=2", "training.steps=2", "lora.targets=all", "lora.merge=true", "part-bytes=400000"),
        ["enrol", "train", "fetch", "deliver", "train", "fetch", "alone", "evaluate"],
    ),
    "fedprllm": ((), ["enrol", "train", "fetch", "fetch", "evaluate"]),
    "fedspallm": (
        ("fedspallm.rounds=2", "fedspallm.capabilities=1,2", "part-bytes=1500000"),
        ["enrol", "train", "fetch", "deliver", "deliver", "deliver", "train", "fetch", "evaluate"],
    ),
    "hetlora": (
        ("hetlora.rounds=2", "hetlora.ranks=2,8", "training.steps=2", "lora.merge=true"),
        ["enrol", "train", "train", "alone", "evaluate"],
    ),
}
"""Settings, and which messages leave the first site in what order."""


@pytest.mark.parametrize("method", sorted(METHODS))
def test_real_processes_give_the_bytes_of_the_simulation(tmp_path: Path, method: str) -> None:
    more, expected_kinds = METHODS[method]
    words = ("run", "two-sites", f"method={method}", *SETTINGS, *more, "--app", str(ROOT))
    tmp_path.joinpath("simulated").mkdir()
    sites = ("hospital-a", "hospital-b")
    with ThreadPoolExecutor() as pool, federation(tmp_path / "deployed", sites) as deployed_on:
        simulation = pool.submit(espalier, tmp_path / "simulated", *words)
        deployment = pool.submit(espalier, tmp_path / "deployed", *words, "--superlink", deployed_on.control)
        for done in (simulation.result(), deployment.result()):
            assert done.returncode == 0, done.stdout + done.stderr
    simulated, deployed = (results_of(tmp_path / way / "runs") for way in ("simulated", "deployed"))

    assert files(deployed / "model") == files(simulated / "model")
    for name in ("masks.safetensors", "adapter/adapter_model.safetensors"):
        assert [file.read_bytes() for file in deployed.glob(name)] == [file.read_bytes() for file in simulated.glob(name)]
    assert len([*deployed.glob("masks.safetensors"), *deployed.glob("adapter/adapter_model.safetensors")]) == 1
    summary = json.loads((deployed / "summary.json").read_text())
    assert summary["status"] == "completed"
    assert [client["site"] for client in summary["clients"]] == ["hospital-a", "hospital-b"]
    assert summary["metrics"][0]["values"]["centralized"] is None
    for name in sites:
        (log,) = (tmp_path / "deployed" / name).glob(f"egress/*-{name}.jsonl")
        kinds = [json.loads(line)["kind"] for line in log.read_text().splitlines()]
        assert kinds == expected_kinds if name == sites[0] else kinds[:2] == ["enrol", "train"]


def test_pooled_data_is_refused_in_deployment(tmp_path: Path) -> None:
    with federation(tmp_path, []) as started:
        command = ("run", "evaluation.centralized=on", "--app", str(ROOT), "--superlink", started.control)
        done = espalier(tmp_path, *command)
    assert done.returncode == 1
    assert "evaluation.centralized = 'on'" in done.stdout
    assert "simulation only" in done.stdout
