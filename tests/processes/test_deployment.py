"""Equal bytes of the same run in simulation and in real processes over gRPC."""

import json
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread

import pytest
from flwr.app import Context, RecordDict

import client_app.app
import server_app.app
from client_app.policy.approval_command import decide, waiting_in
from espalier.launch.configuration import configuration
from espalier.settings import registry
from espalier.storage.hash_chain import chain_check
from tests.bench import home, private_text
from tests.in_process import FakeTime, InProcessGrid
from tests.processes.deployment import (
    Federation,
    espalier,
    eventually,
    federation,
    submit,
    tensor_names,
)
from tests.processes.method_runs import RUNS, SMALLER
from tests.tiny_model import save_tiny_llama

pytestmark = pytest.mark.processes


ROOT = Path(__file__).parent.parent.parent


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


SITES = ("hospital-a", "hospital-b")
"""Sites with warm nodes."""


PLAIN = "hospital-c"
"""Site with a plain SuperNode, which starts a process for every message.

It takes part in one run and refuses the others.
"""


def weights_and_structure(folder: Path) -> dict[str, bytes]:
    """Return the files of a client's own model without its card, which contains its name."""
    return {
        file.name: file.read_bytes()
        for file in folder.iterdir()
        if file.suffix in (".safetensors", ".json")
    }


REFUSED = ("run", "evaluation.centralized=on", "--app", str(ROOT), "--superlink")
"""Command with a setting that deployments do not support."""


BY_ESPALIER = "fedprllm"
"""Method whose run ``espalier run`` starts; ``flwr run`` submits those of other methods."""


WITH_PLAIN = (BY_ESPALIER, "flap")
"""Methods of the runs while the plain node is there: it takes part in one, refuses one."""


@dataclass(frozen=True)
class Sites:
    """Real processes, the arguments of their runs, and the results of two commands."""

    running: Federation
    words: tuple[str, ...]
    done: subprocess.CompletedProcess[str]
    refused: subprocess.CompletedProcess[str]
    submit: Callable[[str], None]
    """Function that starts a run."""
    submitted: set[str]

    def start(self, name: str) -> None:
        """Start a run unless it was started before."""
        if name not in self.submitted:
            self.submitted.add(name)
            self.submit(name)

    def run_of(self, name: str) -> Path | None:
        """Return the directory of a run, or None while it is running."""
        for folder in runs_folder(self.running.folder, name).glob("*"):
            with suppress(OSError, ValueError):
                if json.loads((folder / "summary.json").read_text())["status"] != "running":
                    return folder
        return None

    def wait_for(self, name: str) -> Path:
        """Wait for the end of a run and return its directory."""
        self.start(name)
        eventually(lambda: self.run_of(name) is not None)
        found = self.run_of(name)
        assert found is not None
        return found


def runs_folder(folder: Path, name: str) -> Path:
    """Return the folder for the directory of a run."""
    return folder / "runs" / name.replace(" ", "-")


def words_for(name: str, words: Sequence[str], folder: Path, out_dir: Path) -> tuple[str, ...]:
    """Return the arguments of a run; its own take the place of ``words``."""
    own, _ = RUNS[name]
    pairs = dict(word.split("=", 1) for word in (*words, *own))
    values = {key: value.replace("{folder}", str(folder)) for key, value in pairs.items()}
    values |= {"method": name.split()[0], "out-dir": str(out_dir)}
    return ("two-sites", *(f"{key}={value}" for key, value in values.items()))


HOLDS = ("hospital-b", PLAIN)
"""Sites whose replies with tensors wait for approval: one of each kind of node."""


@contextmanager
def approver(folder: Path) -> Iterator[None]:
    """Release all waiting replies of those sites as soon as they appear."""
    ended = Event()

    def decide_again_and_again() -> None:
        while not ended.wait(0.1):
            for site in HOLDS:
                listed, _ = waiting_in(folder / site)
                list(decide(folder / site, listed, approved=True))

    thread = Thread(target=decide_again_and_again)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sites]:
    """Start one SuperLink and three SuperNodes for all runs, with a model and texts.

    Each test starts its run and simulates it in the meantime. All runs at once would be
    more processes than a small machine can start within the 30 seconds that Flower allows. Flower
    would then start even more processes.
    """
    folder = tmp_path_factory.mktemp("sites")
    shared = home(folder)
    # A site does not send means over few words.
    shared.public.write_text("\n\n".join(private_text(client) for client in range(3, 6)))
    (folder / "align.txt").write_text(private_text(6))
    # FedSODA needs a deeper model; its clients have none.
    save_tiny_llama(folder / "deeper", blocks=4, hidden=64, feed_forward=64)
    texts = {site: folder / f"text-{client}.txt" for client, site in enumerate((*SITES, PLAIN))}
    for client, text in enumerate(texts.values()):
        text.write_text(private_text(client))
    data = (
        f"model={shared.model}",
        "data.source=files",
        f"data.path={folder}/text-{{client}}.txt",
        "data.sequence-length=32",
    )
    words = (
        *data,
        f"evaluation.texts=public={shared.public}",
        "evaluation.sequence-length=32",
        "part-bytes=1024",
    )
    own = {site: f'model-path="{shared.model}" data-path="{text}"' for site, text in texts.items()}
    own = {
        site: f'{config} max-model-bytes=1000000000 models-dir="{folder}/own"'
        for site, config in own.items()
    }
    own[PLAIN] += ' allowed-methods="fedprllm"'
    own |= {site: f'{own[site]} require-approval="tensors"' for site in HOLDS}
    with (
        federation(folder, (*SITES, PLAIN), own, warm=SITES, tapped_site=SITES[0]) as started,
        approver(folder),
    ):

        def told(name: str) -> tuple[str, ...]:
            return words_for(name, words, folder, runs_folder(folder, name))

        def submit_run(name: str) -> None:
            config, _ = configuration(ROOT, told(name), on_this_machine=False)
            submit(ROOT, started, config)

        def by_command(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
            (folder / name).mkdir()
            return espalier(folder / name, *arguments, started.control)

        refused = by_command("refused", *REFUSED)
        submit_run("flap")
        done = by_command("run", "run", *told(BY_ESPALIER), "--app", str(ROOT), "--superlink")
        sites = Sites(started, words, done, refused, submit_run, set(WITH_PLAIN))
        sites.wait_for("flap")
        started.nodes[PLAIN].terminate()
        started.nodes[PLAIN].wait()
        yield sites


def simulation(folder: Path, words: Sequence[str], *, by_the_command: bool) -> Path:
    """Execute a simulation in ``folder / "simulated"`` and return its run directory.

    The command starts Ray; otherwise the same handlers run in this process.
    """
    if by_the_command:
        done = espalier(folder, "run", *words, "--app", str(ROOT))
        assert done.returncode == 0, done.stdout + done.stderr
    else:
        config, _ = configuration(ROOT, words, on_this_machine=True)
        nodes = [
            {"partition-id": client, "num-partitions": len(SITES)} for client in range(len(SITES))
        ]
        grid = InProcessGrid(client_app.app.app, nodes, config)
        server_app.app.run_method(grid, Context(1, 0, {}, RecordDict(), config), FakeTime().clock())
    (found,) = (folder / "simulated").iterdir()
    return found


ALWAYS = ("fedpetuning", "fedprllm")
"""Methods that are always tried: adapters and masks."""


def test_every_method_has_a_run() -> None:
    assert {name.split()[0] for name in RUNS} == registry.METHODS.keys()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ALWAYS else [pytest.mark.slow])
        for name in sorted(RUNS)
    ],
)
def test_deployment_equals_simulation(tmp_path: Path, sites: Sites, name: str) -> None:
    running, (_, expected_kinds) = sites.running, RUNS[name]
    words = words_for(name, sites.words, running.folder, tmp_path / "simulated")
    sites.start(name)
    simulated = simulation(tmp_path, words, by_the_command=name == BY_ESPALIER)
    deployed = sites.wait_for(name)

    # The models of these methods stay at the clients.
    stays = name in ("fedspine", "sft-p")
    assert (deployed / "model").exists() == (not stays)
    if not stays:
        assert files(deployed / "model") == files(simulated / "model")
    lineage = json.loads((deployed / "run.json").read_text())["lineage"]
    for site, client in (
        zip(SITES, sorted((simulated / "clients").glob("*")), strict=True) if stays else ()
    ):
        (own,) = (running.folder / "own").glob(f"{lineage}-{site}")
        assert weights_and_structure(own) == weights_and_structure(client)
    for file_name in (
        "masks.safetensors",
        "adapter/adapter_model.safetensors",
        "generator.safetensors",
    ):
        assert [file.read_bytes() for file in deployed.glob(file_name)] == [
            file.read_bytes() for file in simulated.glob(file_name)
        ]
    beside = [
        *deployed.glob("masks.safetensors"),
        *deployed.glob("adapter/adapter_model.safetensors"),
    ]
    assert len(beside) == (0 if name in SMALLER else 1)
    summary = json.loads((deployed / "summary.json").read_text())
    assert summary["status"] == "completed"
    took_part = (*SITES, PLAIN) if name == BY_ESPALIER else SITES
    assert [client["site"] for client in summary["clients"]] == list(took_part)
    assert summary["metrics"][0]["values"]["centralized"] is None
    for site in took_part:
        log = running.folder / site / "egress" / f"{lineage}-{site}.jsonl"
        assert chain_check(log).fault == ""
        entries = [json.loads(line) for line in log.read_text().splitlines()]
        assert all(
            ("approved" in entry) == (site in HOLDS and entry["blobs"] != [])
            for entry in entries
            if "blobs" in entry
        )
        assert {entry["entry"] for entry in entries} == (
            {"reply", "waiting", "approved"} if site in HOLDS else {"reply"}
        )
        kinds = [entry["kind"] for entry in entries]
        assert (
            kinds == expected_kinds
            if site == SITES[0]
            else (kinds[0], "train" in kinds) == ("enrol", True)
        )


def test_the_command_ends_with_its_run(sites: Sites) -> None:
    assert sites.done.returncode == 0, sites.done.stdout + sites.done.stderr
    assert str(sites.wait_for(BY_ESPALIER)) in sites.done.stdout


def test_node_refusing_a_method_takes_no_part(sites: Sites) -> None:
    summary = json.loads((sites.wait_for("flap") / "summary.json").read_text())
    assert [client["site"] for client in summary["clients"]] == list(SITES)
    assert any(PLAIN in who and "allowed-methods" in why for who, why in summary["refused"].items())


def test_pooled_data_is_refused_in_deployment(sites: Sites) -> None:
    done = sites.refused
    assert done.returncode == 2
    assert "evaluation.centralized = 'on': input should be 'auto' or 'off'" in done.stderr


def test_tensor_names_are_readable_without_tls(sites: Sites) -> None:
    """The search of ``test_secure_deployment`` finds names if there is no TLS."""
    run = json.loads((sites.wait_for(BY_ESPALIER) / "run.json").read_text())
    names = tensor_names(
        sites.running.folder / SITES[0] / "egress" / f"{run['lineage']}-{SITES[0]}.jsonl"
    )
    assert names
    assert sites.running.tap.readable(names) == names
