"""Processes that are killed in the middle of a run: no finished work is lost.

The tests run with ``pytest -m faults``.
"""

import os
import shlex
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.processes.deployment import Federation, espalier, eventually, federation
from tests.processes.interruptible_run import (
    ROOT,
    SETTINGS,
    SITES,
    finished_rounds,
    first_round,
    repeated,
    results_of,
    started,
    summary,
    without_traffic,
    words_of,
)

pytestmark = pytest.mark.faults


def kill_serverapp(running: Federation) -> None:
    for pid in running.processes("flwr-serverapp"):
        os.kill(pid, signal.SIGKILL)


def test_killed_serverapp_resumes_to_same_bytes(tmp_path: Path, whole: Path) -> None:
    with federation(tmp_path / "killed", SITES) as killed:
        with started(tmp_path / "killed", "run", *SETTINGS, "--superlink", killed.control):
            eventually(lambda: finished_rounds(tmp_path / "killed") >= 2)
            kill_serverapp(killed)
            eventually(lambda: not killed.processes("flwr-serverapp"))
        run = results_of(tmp_path / "killed")
        before = finished_rounds(tmp_path / "killed")
        assert 2 <= before < 6
        done = espalier(
            tmp_path / "killed",
            "run",
            *SETTINGS,
            f"resume-from={run}",
            "--superlink",
            killed.control,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"resumed      after round {before}" in done.stdout
    assert repeated(run) == repeated(whole)
    assert summary(run) == summary(whole)


def test_killed_superlink_resumes_to_same_bytes(tmp_path: Path, whole: Path) -> None:
    with federation(tmp_path, SITES) as running:
        with started(tmp_path, "run", *SETTINGS, "--superlink", running.control) as espalier_run:
            first_round(tmp_path, espalier_run)
            running.superlink.kill()
            running.superlink.wait()
            eventually(lambda: espalier_run.poll() is not None)
        log = (tmp_path / "command.log").read_text()
        assert espalier_run.returncode == 1
        assert f"the SuperLink at {running.control} does not answer" in log
        assert "start it again with the same --database" in log
        assert (
            "Traceback (most recent call last):\n  File"
            not in log.split("espalier: the SuperLink")[1]
        )
        running.superlink = running.start_superlink()
        done = espalier(tmp_path, *resume_hint(tmp_path))
        assert done.returncode == 0, done.stdout + done.stderr
        assert "resumed      after round" in done.stdout
    run = results_of(tmp_path)
    assert repeated(run) == repeated(whole)
    assert summary(run) == summary(whole)


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Mount a small file system of its own; skip the test without the right to mount."""
    folder.mkdir(parents=True)
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def fill(file: Path) -> None:
    """Write zeros until the disk is full."""
    with open(file, "wb", buffering=0) as filler, suppress(OSError):
        while True:
            filler.write(bytes(4096))


def test_full_disk_run_resumes_to_same_bytes(tmp_path: Path, whole: Path) -> None:
    with (
        small_disk(tmp_path / "full" / "runs", "64m") as disk,
        federation(tmp_path / "full", SITES) as running,
    ):
        with started(
            tmp_path / "full", "run", *SETTINGS, "--superlink", running.control
        ) as espalier_run:
            eventually(lambda: finished_rounds(tmp_path / "full") >= 1)
            fill(disk / "filler")
            eventually(lambda: espalier_run.poll() is not None)
        assert espalier_run.returncode == 1
        assert "No space left on device" in (tmp_path / "full" / "command.log").read_text()
        (disk / "filler").unlink()
        run = results_of(tmp_path / "full")
        assert 1 <= finished_rounds(tmp_path / "full") < 6
        done = espalier(
            tmp_path / "full",
            "run",
            *SETTINGS,
            f"resume-from={run}",
            "--superlink",
            running.control,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        resumed = repeated(run), summary(run)
    assert resumed == (repeated(whole), summary(whole))


def test_lost_supernode_costs_its_contribution(tmp_path: Path) -> None:
    with federation(tmp_path, SITES) as running:
        command = (
            "run",
            *SETTINGS,
            "quorum=0.5",
            "deadline-seconds=60.0",
            "--superlink",
            running.control,
        )
        with started(tmp_path, *command) as espalier_run:
            first_round(tmp_path, espalier_run)
            running.nodes["hospital-b"].kill()
            eventually(lambda: espalier_run.poll() is not None)
            assert espalier_run.returncode == 0, (tmp_path / "command.log").read_text()
    clients = summary(results_of(tmp_path))["clients"]
    assert [client["status"] for client in clients] == ["completed", "dropped"]


def test_returning_supernode_goes_on(tmp_path: Path, whole: Path) -> None:
    with federation(tmp_path, SITES) as running:
        command = (
            "run",
            *SETTINGS,
            "deadline-seconds=20.0",
            "attempts=8",
            "--superlink",
            running.control,
        )
        with started(tmp_path, *command) as espalier_run:
            first_round(tmp_path, espalier_run)
            running.nodes["hospital-b"].kill()
            running.nodes["hospital-b"].wait()
            running.start_node("hospital-b")
            eventually(lambda: espalier_run.poll() is not None)
            assert espalier_run.returncode == 0, (tmp_path / "command.log").read_text()
    clients = summary(results_of(tmp_path))["clients"]
    assert [client["status"] for client in clients] == ["completed", "completed"]
    assert without_traffic(results_of(tmp_path)).items() <= repeated(whole).items()


def test_killed_clientapp_is_started_again(tmp_path: Path, whole: Path) -> None:
    with federation(tmp_path, SITES) as running:
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
            eventually(lambda: bool(running.processes("flwr-clientapp")))
            for pid in running.processes("flwr-clientapp"):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            eventually(lambda: espalier_run.poll() is not None)
            assert espalier_run.returncode == 0, (tmp_path / "command.log").read_text()
    clients = summary(results_of(tmp_path))["clients"]
    assert [client["status"] for client in clients] == ["completed", "completed"]
    assert without_traffic(results_of(tmp_path)).items() <= repeated(whole).items()


# ----- a simulation -------------------------------------------------------------------------------

SIMULATED = (
    "run", "pruning.strategy=iterative", "num-clients=2", "threads=1", "evaluation.max-samples=4",
    "data.num-samples=2", "evaluation.centralized=off", "evaluation.local-baseline=false",
    "--no-measure", "--app", str(ROOT),
)  # fmt: skip


def gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@contextmanager
def simulated(folder: Path) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """Start a simulation and yield it in mid-work, with all processes that it started."""
    with started(folder, *SIMULATED) as espalier_run:
        eventually(lambda: finished_rounds(folder) >= 1 or espalier_run.poll() is not None)
        processes = psutil.Process(espalier_run.pid).children(recursive=True)
        named = words_of(processes)
        assert all(
            program in named
            for program in ("flower-superlink", "flower-superexec", "flwr-simulation", "raylet")
        )
        yield espalier_run, processes


def log_of_the_last_start(folder: Path) -> str:
    """Return the log since the last start.

    If Ray does not start, its tracebacks are logged and it is started again.
    """
    return (folder / "command.log").read_text().split("Starting logstream")[-1]


def resume_hint(folder: Path) -> list[str]:
    """Return the arguments of the ``espalier`` command that the log printed last."""
    words = shlex.split((folder / "command.log").read_text().rstrip().splitlines()[-1])
    assert (words[0], words[-1]) == ("espalier", f"resume-from={max((folder / 'runs').iterdir())}")
    return words[1:]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_ended_simulation_leaves_no_process(tmp_path: Path, number: signal.Signals) -> None:
    with simulated(tmp_path) as (espalier_run, processes):
        espalier_run.send_signal(number)
        eventually(lambda: espalier_run.poll() is not None)
        eventually(lambda: all(map(gone, processes)))
    assert espalier_run.returncode == (-9 if number == signal.SIGKILL else 130)
    assert "Traceback" not in log_of_the_last_start(tmp_path)
    if number == signal.SIGINT:
        done = espalier(tmp_path, *resume_hint(tmp_path))
        assert done.returncode == 0, done.stdout + done.stderr
        assert "resumed      after round" in done.stdout


def test_killed_superlink_tells_how_to_go_on(tmp_path: Path) -> None:
    with simulated(tmp_path) as (espalier_run, processes):
        for process in processes:
            if any("flower-superlink" in word for word in process.cmdline()[1:2]):
                process.kill()
        eventually(lambda: espalier_run.poll() is not None)
        assert all(map(gone, processes))
    log = log_of_the_last_start(tmp_path)
    assert espalier_run.returncode == 1
    assert "the SuperLink of this run was killed (signal 9) before the run had ended" in log
    assert "Traceback" not in log
    assert resume_hint(tmp_path)[0] == "run"
