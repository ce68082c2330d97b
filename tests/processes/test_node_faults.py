"""Faults of nodes: a slow network that loses packets, killed workers, and late sites."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest

from espalier.flower.programs import sites_share_port
from tests.devices import NEEDS_CUDA
from tests.processes.deployment import (
    BIN,
    Federation,
    environment,
    espalier,
    eventually,
    federation,
    process,
    submit,
    superlink_options,
)
from tests.processes.interruptible_run import (
    ROOT,
    SETTINGS,
    SITES,
    first_round,
    repeated,
    results_of,
    started,
    summary,
    without_traffic,
    words_of,
)
from tests.processes.slow_network import SERVER, Ends, slow_network

pytestmark = pytest.mark.faults

FLEET = f"{SERVER}:9092"
CONTROL = FLEET if sites_share_port() else "127.0.0.1:9093"
WARM, PLAIN = SITES
TUNED = (
    "fedpetuning", "num-clients=2", "quorum=1.0", "federation.rounds=2", "training.steps=200",
    "evaluation.max-samples=4", "evaluation.centralized=off", "evaluation.local-baseline=false",
    "deadline-seconds=240.0", "attempts=4", "--app", str(ROOT),
)  # fmt: skip
"""Settings of rounds that take long enough for sites to report their steps."""


def listens(ends: Ends, address: str) -> bool:
    host, _, port = address.partition(":")
    asked = f"import socket, sys; sys.exit(socket.socket().connect_ex(({host!r}, {port})))"
    return subprocess.run([*ends.server, sys.executable, "-c", asked], check=False).returncode == 0


def test_slow_lossy_network_changes_no_byte(tmp_path: Path, whole: Path) -> None:
    """Both kinds of node work with 2 Mbit/s, a delay of 0.1 s each way and 2% packet loss."""
    env = environment(tmp_path / "flower")
    superlink = [
        str(BIN / "flower-superlink"), "--insecure", "--database", str(tmp_path / "superlink.db"),
        *superlink_options(9093, FLEET),
        *(["--host", SERVER, "--port", "9092"] if sites_share_port() else []),
    ]  # fmt: skip
    with slow_network(delay=0.1, loss=0.02, megabits=2.0) as ends, ExitStack() as stack:
        stack.enter_context(process([*ends.server, *superlink], tmp_path, "superlink", env))
        eventually(lambda: listens(ends, CONTROL) and listens(ends, FLEET))
        for site, port in ((WARM, 9094), (PLAIN, 9095)):
            program = (
                [str(BIN / "espalier"), "node"] if site == WARM else [str(BIN / "flower-supernode")]
            )
            own = ["--node-config", f'site="{site}" state-dir="{tmp_path / site}" min-tokens=1']
            where = ["--insecure", "--superlink", FLEET, "--port", str(port)]
            stack.enter_context(
                process([*ends.site, *program, *where, *own], tmp_path, f"node-{site}", env)
            )
        command = [*ends.server, str(BIN / "espalier"), "run", *SETTINGS, "--superlink", CONTROL]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            timeout=1800,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    clients = summary(results_of(tmp_path))["clients"]
    assert [client["status"] for client in clients] == ["completed", "completed"]
    assert without_traffic(results_of(tmp_path)).items() <= repeated(whole).items()


def workers(running: Federation, site: str) -> list[int]:
    return running.processes("client_app.node.warm_worker", site)


def test_a_worker_killed_in_a_round_is_replaced(tmp_path: Path, whole: Path) -> None:
    with federation(tmp_path, SITES, warm=SITES) as running:
        command = (
            "run",
            *SETTINGS,
            "deadline-seconds=25.0",
            "attempts=4",
            "--superlink",
            running.control,
        )
        with started(tmp_path, *command) as espalier_run:
            first_round(tmp_path, espalier_run)
            (first,) = workers(running, WARM)
            os.kill(first, signal.SIGKILL)
            eventually(lambda: espalier_run.poll() is not None)
            assert espalier_run.returncode == 0, (tmp_path / "command.log").read_text()
            (second,) = workers(running, WARM)
            assert second != first
    clients = summary(results_of(tmp_path))["clients"]
    assert [client["status"] for client in clients] == ["completed", "completed"]
    assert without_traffic(results_of(tmp_path)).items() <= repeated(whole).items()


def test_worker_killed_in_step_costs_only_time(tmp_path: Path) -> None:
    adapters = []
    for name in ("undisturbed", "killed"):
        folder = tmp_path / name
        folder.mkdir()
        with (
            federation(folder, SITES, warm=(WARM,)) as running,
            started(folder, "run", *TUNED, "--superlink", running.control) as espalier_run,
        ):
            if name == "killed":
                _kill_in_mid_step(folder, running)
            eventually(lambda: espalier_run.poll() is not None)
            assert espalier_run.returncode == 0, (folder / "command.log").read_text()
        adapters.append((results_of(folder) / "adapter" / "adapter_model.safetensors").read_bytes())
    assert adapters[0] == adapters[1]


def _kill_in_mid_step(folder: Path, running: Federation) -> None:
    """Kill a worker that has reported a step but not answered.

    The worker is stopped first, so that it cannot continue.
    """
    eventually(
        lambda: (
            re.search(
                rf"{WARM} +train: training step", (folder / f"supernode-{WARM}.log").read_text()
            )
            is not None
        )
    )
    (worker,) = workers(running, WARM)
    os.kill(worker, signal.SIGSTOP)
    (log,) = (folder / WARM / "egress").iterdir()
    assert not [
        line for line in log.read_text().splitlines() if json.loads(line)["kind"] == "train"
    ]
    os.kill(worker, signal.SIGKILL)


def test_other_program_runs_on_no_warm_node(tmp_path: Path) -> None:
    """The changed program records each process that imports it.

    No process of the site may be among them.
    """
    app = tmp_path / "app"
    seen = tmp_path / "seen"
    shutil.copytree(
        ROOT,
        app,
        ignore=shutil.ignore_patterns(".git", "docs", "tests", "benchmarks", "__pycache__"),
    )
    seen.mkdir()
    program = app / "client_app" / "app.py"
    told = (
        f"open(f'{seen}/{{__import__(\"os\").getpid()}}',"
        " 'w').write(open('/proc/self/cmdline').read())"
    )
    program.write_text(f"{program.read_text()}\n{told}\n")
    config = {
        "method": "fedprllm",
        "num-clients": 1,
        "quorum": 1.0,
        "enrol-seconds": 5.0,
        "out-dir": str(tmp_path / "runs"),
    }
    with federation(tmp_path, (WARM,), warm=(WARM,)) as running:
        log = tmp_path / f"supernode-{WARM}.log"
        eventually(lambda: "SuperNode ID" in log.read_text())
        submit(app, running, config)
        eventually(lambda: "this node runs only its installed program" in log.read_text())
        own = {
            str(process.pid)
            for process in psutil.Process(running.nodes[WARM].pid).children(recursive=True)
        }
        assert own
        assert not own & {file.name for file in seen.iterdir()}
        assert not [
            file
            for file in seen.iterdir()
            if "warm_worker" in file.read_text() or "clientapp" in file.read_text()
        ]


def test_idle_worker_ends_and_is_replaced(tmp_path: Path) -> None:
    settings = [*SETTINGS, "num-clients=1", "quorum=1.0"]
    with federation(tmp_path, (WARM,), warm=(WARM,), warm_words=("--warm-seconds", "1")) as running:
        done = espalier(tmp_path, "run", *settings, "--superlink", running.control)
        assert done.returncode == 0, done.stdout + done.stderr
        eventually(lambda: not workers(running, WARM))
        done = espalier(tmp_path, "run", *settings, "seed=1", "--superlink", running.control)
        assert done.returncode == 0, done.stdout + done.stderr


@NEEDS_CUDA
def test_two_nodes_share_a_gpu(tmp_path: Path, whole: Path) -> None:
    with federation(tmp_path, SITES, dict.fromkeys(SITES, 'device="cuda"'), warm=SITES) as running:
        done = espalier(tmp_path, "run", *SETTINGS, "--superlink", running.control)
        assert done.returncode == 0, done.stdout + done.stderr
    clients = summary(results_of(tmp_path))["clients"]
    assert [client["status"] for client in clients] == ["completed", "completed"]


def test_late_site_takes_part(tmp_path: Path, whole: Path) -> None:
    with (
        federation(tmp_path, SITES, at_once=(PLAIN,)) as running,
        started(tmp_path, "run", *SETTINGS, "--superlink", running.control) as espalier_run,
    ):
        eventually(lambda: "waiting up to" in (tmp_path / "command.log").read_text())
        running.start_node(WARM)
        eventually(lambda: espalier_run.poll() is not None)
        assert espalier_run.returncode == 0, (tmp_path / "command.log").read_text()
    clients = summary(results_of(tmp_path))["clients"]
    assert [client["status"] for client in clients] == ["completed", "completed"]
    assert without_traffic(results_of(tmp_path)).items() <= repeated(whole).items()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ended_run_leaves_superlink_idle(tmp_path: Path, number: signal.Signals) -> None:
    """SuperLink and nodes keep running, and the printed command resumes the run.

    Flower's own node may keep a reply to the ended run, and then answers one message late.
    """
    with federation(tmp_path, SITES, warm=SITES) as running:
        with started(tmp_path, "run", *SETTINGS, "--superlink", running.control) as espalier_run:
            first_round(tmp_path, espalier_run)
            espalier_run.send_signal(number)
            eventually(lambda: espalier_run.poll() is not None)
        assert espalier_run.returncode == 130
        eventually(
            lambda: (
                not running.processes("flwr-serverapp") and not running.processes("flwr-clientapp")
            )
        )
        assert running.superlink.poll() is None
        assert all(node.poll() is None for node in running.nodes.values())
        done = espalier(
            tmp_path,
            "run",
            *SETTINGS,
            f"resume-from={results_of(tmp_path)}",
            "--superlink",
            running.control,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "resumed      after round" in done.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_ended_warm_node_leaves_no_process(tmp_path: Path, number: signal.Signals) -> None:
    with federation(tmp_path, (WARM,), warm=(WARM,)) as running:
        command = ("run", *SETTINGS, "num-clients=1", "--superlink", running.control)
        with started(tmp_path, *command) as espalier_run:
            first_round(tmp_path, espalier_run)
            node = psutil.Process(running.nodes[WARM].pid)
            processes = node.children(recursive=True)
            named = words_of(processes)
            assert all(
                program in named
                for program in (
                    "espalier.flower.supernode",
                    "client_app.node.warm_node",
                    "client_app.node.warm_worker",
                )
            )
            node.send_signal(number)
            eventually(lambda: running.nodes[WARM].poll() is not None)
            eventually(lambda: not any(map(_lives, processes)))
            espalier_run.terminate()


def _lives(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
