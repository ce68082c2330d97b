"""Hashes of the results of the presets, to show that a change of the code changes no result.

    python -m benchmarks.result_hashes before.json
    python -m benchmarks.result_hashes after.json --compare before.json [PRESET ...]

Each preset runs in a process of its own, with the handlers of a real run and without Ray or a
SuperLink, for at most two rounds and with little evaluation. The hashes repeat on one machine with
the same libraries. Model cards and modeling code in a result are texts of this project, so they are
left out, and so is the path of the base model that an adapter names. Presets of published models
are left out too, because their models are not part of the project.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from flwr.app import Context, RecordDict

from espalier.launch.app import find_app
from espalier.launch.configuration import configuration
from espalier.launch.presets import preset_files
from tests.processes.method_runs import RUNS

RESULTS = ("model", "adapter", "clients", "masks.safetensors")
TEXTS = (".md", ".py")
SHORT = ("evaluation.max-samples=1", "evaluation.centralized=off")
VARIANTS = {
    "fedprllm-iterative": ["fedprllm", "pruning.strategy=iterative"],
    "llm-pruner-rescale": ["llm-pruner", "llm-pruner.rescale=groups"],
    **{
        f"{name.replace(' ', '-')}-short": [f"method={name.split()[0]}", *words]
        for name, (words, _) in RUNS.items()
        if not any("{folder}" in word for word in words)
    },
}
"""Settings that no preset has, by the name of the variant; also the short runs of ``tests``."""


def presets() -> list[str]:
    """Return the presets whose models are part of the project, and the variants."""
    files = preset_files(find_app(None))
    demos = [name for name in files if "a directory of yours" not in files[name].read_text()]
    return [*demos, *VARIANTS]


def run_here(words: list[str], folder: Path) -> None:
    """Run a preset in this process, with its run directory in ``folder``."""
    from client_app.app import app
    from server_app.app import run_method
    from tests.in_process import InProcessGrid

    words = [*words, *SHORT, f"out-dir={folder / 'runs'}"]
    config, settings = configuration(find_app(None), words, on_this_machine=True)
    if "rounds" in settings.job.FEDERATION:
        config["federation.rounds"] = min(config["federation.rounds"], 2)
    number = config["num-clients"]
    nodes = [{"partition-id": client, "num-partitions": number} for client in range(number)]
    run_method(InProcessGrid(app, nodes, config), Context(1, 0, {}, RecordDict(), config))


def hashes_of(words: list[str]) -> dict[str, str]:
    """Run a preset in a new process and return the SHA-256 of each file of its result."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        env = os.environ | {"ESPALIER_STATE_DIR": str(folder / "state")}
        command = [sys.executable, "-m", __spec__.name, "--here", name, *words]
        subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL)
        (run,) = (folder / "runs").iterdir()
        found = [file for result in RESULTS for file in _files(run / result)]
        return {
            str(file.relative_to(run)): hashlib.sha256(_content(file)).hexdigest()
            for file in found
            if file.suffix not in TEXTS
        }


def _content(file: Path) -> bytes:
    """Return the bytes of a file; of ``adapter_config.json`` those without the base's path."""
    if file.name != "adapter_config.json":
        return file.read_bytes()
    document = json.loads(file.read_bytes())
    return json.dumps(document | {"base_model_name_or_path": None}).encode()


def _files(result: Path) -> list[Path]:
    found = [result, *result.rglob("*")]
    return sorted(file for file in found if file.is_file())


def main() -> int:
    """Record the hashes, and compare them with earlier ones if asked to."""
    arguments = _arguments()
    if arguments.here:
        run_here([str(arguments.out), *arguments.presets], arguments.here)
        return 0
    chosen = arguments.presets or presets()
    found = {}
    for name in chosen:
        found[name] = hashes_of(VARIANTS.get(name, [name]))
        print(f"{name}: {len(found[name])} files", flush=True)
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    if arguments.compare is None:
        return 0
    before = json.loads(arguments.compare.read_text())
    for name in chosen:
        if name not in before:
            print(f"{name}: is not in {arguments.compare}, so it was not compared")
    changed = [name for name in chosen if found[name] != before.get(name, found[name])]
    print(f"changed: {', '.join(changed)}" if changed else "no result has changed")
    return 1 if changed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="JSON file to write")
    parser.add_argument("presets", nargs="*", metavar="PRESET", help="default: all")
    parser.add_argument("--compare", type=Path, help="JSON file of an earlier call")
    parser.add_argument("--here", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
