"""Compose file on a real engine.

The tests cover the documented command, the keys, the users, a killed site and a restarted
SuperLink.
"""

import json
import re
import shlex
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.containers.engines import Engine, engine

pytestmark = pytest.mark.containers

SITES = ("hospital-a", "hospital-b", "hospital-c")
SERVICES = ("superlink", *SITES)
MAX_BYTES = 1.2e9
"""Maximum size of the image without extras."""
RUN_SECONDS = 1800.0
LITTLE_MEMORY = "460m"
"""Memory that is enough for a SuperNode, but not for libraries and a model as well."""
ITERATIVE = ("pruning.strategy=iterative", "evaluation.max-samples=4")
"""Settings with six rounds, so that a run can be interrupted."""
RUN = (
    "espalier",
    "run",
    "two-sites",
    "num-clients=3",
    "enrol-seconds=180.0",
    "site-keys=/public/sites",
    *ITERATIVE,
)
WHERE = ("--superlink", "127.0.0.1:9093", "--root-certificates", "/public/ca.crt")

KILL_ALL = """
import os, psutil
for process in psutil.process_iter():
    if process.pid not in (1, os.getpid()):
        process.kill()
"""
"""Program that kills all processes except process 1.

Process 1 then ends the container with the exit code of a killed process.
"""
USERS = "import psutil; print(*sorted({process.uids().real for process in psutil.process_iter()}))"
PRIVATE_KEYS = """
import os
for folder, _, names in os.walk("/"):
    if not folder.startswith(("/proc", "/sys", "/opt", "/usr")):
        for name in names:
            path = os.path.join(folder, name)
            if name.endswith(".key") and os.access(path, os.R_OK):
                print(path)
"""


@pytest.fixture(scope="module")
def started() -> Iterator[Engine]:
    """Yield an engine with the built image."""
    with engine() as found:
        seconds = found.build()
        size = int(found.inspect("image", found.image, "{{.Size}}"))
        print(
            f"\n{shlex.join(found.command)}: image of {size / 1e9:.2f} GB, built in {seconds:.0f} s"
        )
        yield found


@pytest.fixture(scope="module")
def demo(started: Engine) -> tuple[Engine, subprocess.CompletedProcess[str]]:
    """Return the engine and the result of the documented command."""
    began = time.monotonic()
    done = started.compose("run", "--rm", "run", seconds=RUN_SECONDS, check=False)
    print(f"\nthe demo took {time.monotonic() - began:.0f} s")
    return started, done


def test_the_image_is_small(started: Engine) -> None:
    assert int(started.inspect("image", started.image, "{{.Size}}")) < MAX_BYTES


def test_documented_command_shows_code_and_log(
    demo: tuple[Engine, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    started, done = demo
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 of 3 clients" in done.stdout
    # This line appears only in the logs of the sites.
    assert "waiting for runs" not in done.stdout + done.stderr
    (run,) = results(started, tmp_path)
    assert statuses(run) == dict.fromkeys(SITES, "completed")
    assert (run / "model" / "model.safetensors").stat().st_size > 0
    failed = started.compose(
        "run", "--rm", "run", "espalier", "run", "no-such-preset", *WHERE, check=False
    )
    assert failed.returncode == 2


def test_no_process_is_root_s(demo: tuple[Engine, subprocess.CompletedProcess[str]]) -> None:
    started, _ = demo
    assert {service: started.python(service, USERS) for service in SERVICES} == dict.fromkeys(
        SERVICES, "1000"
    )
    once = started.compose("run", "--rm", "run", "python", "-c", USERS)
    assert once.stdout.split()[-1] == "1000"


def test_a_private_key_is_seen_by_its_owner_only(
    demo: tuple[Engine, subprocess.CompletedProcess[str]],
) -> None:
    started, _ = demo
    for site in SITES:
        assert started.python(site, PRIVATE_KEYS).split() == [f"/site/keys/sites/{site}/{site}.key"]
    server = {Path(path).name for path in started.python("superlink", PRIVATE_KEYS).split()}
    assert server == {"ca.key", "server.key"}
    assert (
        ".key\n" not in started.compose("run", "--rm", "run", "python", "-c", PRIVATE_KEYS).stdout
    )


def test_a_run_survives_a_killed_site(
    demo: tuple[Engine, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    started, _ = demo
    victim = started.container("hospital-b")
    with running(started, tmp_path / "log", *RUN, *WHERE) as command:
        wait_for(tmp_path / "log", r"checkpoint +after round 1", command)
        kill_all(started, "hospital-b")
        assert command.wait(RUN_SECONDS) == 0, (tmp_path / "log").read_text()
    # The engine restarts the same container.
    assert started.container("hospital-b") == victim
    assert statuses(results(started, tmp_path)[-1]) == dict.fromkeys(SITES, "completed")


def test_run_resumes_after_killed_superlink(
    demo: tuple[Engine, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    started, _ = demo
    with running(started, tmp_path / "log", *RUN, "seed=1", *WHERE) as command:
        wait_for(tmp_path / "log", r"checkpoint +after round 1", command)
        kill_all(started, "superlink")
        assert command.wait(RUN_SECONDS) == 1, (tmp_path / "log").read_text()
    told = (tmp_path / "log").read_text()
    resume = re.search(r"^ +(espalier run .*resume-from=\S+)", told, re.MULTILINE)
    assert resume is not None, told
    done = started.compose(
        "run", "--rm", "run", *shlex.split(resume[1]), seconds=RUN_SECONDS, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # The resumed run continues after round 1.
    assert "checkpoint   after round 1\n" not in done.stdout
    assert statuses(results(started, tmp_path)[-1]) == dict.fromkeys(SITES, "completed")


def test_out_of_memory_site_is_reported(
    demo: tuple[Engine, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """The site's log names the memory limit, and the server reports the site.

    The other sites complete the run.
    """
    started, _ = demo
    limited = tmp_path / "limited.yaml"
    limited.write_text(f"services:\n  hospital-b: {{mem_limit: {LITTLE_MEMORY}}}\n")
    started.files.append(limited)
    started.compose("up", "--detach", "--no-deps", "hospital-b")
    settings = [
        "seed=2",
        "quorum=0.5",
        "enrol-seconds=180.0",
        "evaluation.max-samples=4",
        "site-keys=/public/sites",
    ]
    done = started.compose(
        "run",
        "--rm",
        "run",
        "espalier",
        "run",
        "two-sites",
        "num-clients=3",
        *settings,
        *WHERE,
        seconds=RUN_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = started.run("logs", started.container("hospital-b"))
    assert (
        "espalier: this node ran out of memory: the system killed the process"
        in told.stdout + told.stderr
    )
    summary = json.loads((results(started, tmp_path)[-1] / "summary.json").read_text())
    assert "this node ran out of memory" in json.dumps(summary)


@contextmanager
def running(started: Engine, log: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a run whose output goes to a file."""
    with open(log, "wb") as output:
        command = started.compose_words("run", "--rm", "run", *words)
        process = subprocess.Popen(
            command,
            env=started.environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_for(log: Path, pattern: str, command: subprocess.Popen[bytes]) -> None:
    """Wait until the log matches ``pattern``; fail if the command ends first."""
    end = time.monotonic() + RUN_SECONDS
    while not re.search(pattern, told := log.read_text(errors="replace")):
        assert command.poll() is None, told
        assert time.monotonic() < end, told
        time.sleep(0.2)


def kill_all(started: Engine, service: str) -> None:
    """Kill all processes of a service's container.

    The program that kills them may end with them.
    """
    started.run("exec", started.container(service), "python", "-c", KILL_ALL, check=False)


def results(started: Engine, folder: Path) -> list[Path]:
    """Copy the run directories out of the volume, as the compose file says; oldest first."""
    started.run("cp", f"{started.container('superlink')}:/results/runs", str(folder))
    return sorted((folder / "runs").iterdir())


def statuses(run: Path) -> dict[str, str]:
    """Return the final status of each site."""
    return {
        client["site"]: client["status"]
        for client in json.loads((run / "summary.json").read_text())["clients"]
    }
