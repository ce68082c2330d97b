"""Processes under a keeper end with their parent, however it ends and wherever they moved."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from espalier.launch import process_keeper
from espalier.launch.child_processes import interrupted_later, kept, uninterrupted
from espalier.launch.process_keeper import TOKEN, carrying, end_all

SLEEPS = "import time; time.sleep(600)"
IGNORES_SIGTERM = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True);"
    " time.sleep(600)"
)
FAMILY = f"""
import os, subprocess, sys, time
folder = sys.argv[1]
def note(name, pid):
    with open(os.path.join(folder, name + ".new"), "w") as file:
        file.write(str(pid))
    os.rename(os.path.join(folder, name + ".new"), os.path.join(folder, name))
note("child", subprocess.Popen([sys.executable, "-c", {SLEEPS!r}]).pid)
note("session", subprocess.Popen([sys.executable, "-c", {SLEEPS!r}], start_new_session=True).pid)
deaf = subprocess.Popen([sys.executable, "-c", {IGNORES_SIGTERM!r}], stdout=subprocess.PIPE)
deaf.stdout.readline()
note("deaf", deaf.pid)
orphan = f"import os, subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {SLEEPS!r}], \
start_new_session=True"
orphan += ", env={{'PATH': os.environ['PATH']}}, stdout=subprocess.DEVNULL); print(p.pid)"
note("orphan", int(subprocess.run([sys.executable, "-c", orphan], stdout=subprocess.PIPE).stdout))
note("itself", os.getpid())
time.sleep(600)
"""
"""Program that starts four kinds of child processes.

They are a plain child, one in its own session, one that ignores SIGTERM, and one without a parent
and with another environment, as background servers have.
"""
NAMES = ("child", "session", "deaf", "orphan", "itself")

PARENT = """
import os, sys
from pathlib import Path
from espalier.launch.child_processes import interrupted_later, kept
folder = Path(sys.argv[1])
with kept([sys.executable, "-c", sys.argv[2], str(folder)], folder / "temporary", os.environ, \
folder) as process:
    (folder / "keeper").write_text(str(process.pid))
    process.wait()
"""


def eventually(what: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not what():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def family(folder: Path) -> list[psutil.Process]:
    eventually(lambda: (folder / "itself").exists())
    return [psutil.Process(int((folder / name).read_text())) for name in NAMES]


@pytest.fixture
def parent(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    (tmp_path / "temporary").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path), FAMILY], start_new_session=True
    )
    yield process
    with suppress(ProcessLookupError):
        process.kill()
    process.wait()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_outlives_the_parent(
    parent: subprocess.Popen[bytes], tmp_path: Path, number: signal.Signals
) -> None:
    processes = family(tmp_path)
    keeper_process = psutil.Process(int((tmp_path / "keeper").read_text()))
    parent.send_signal(number)
    eventually(lambda: all(map(gone, [*processes, keeper_process])))
    # The parent handles SIGINT and removes the folder itself.
    if number != signal.SIGINT:
        eventually(lambda: not (tmp_path / "temporary").exists())


def test_nothing_outlives_the_block(tmp_path: Path) -> None:
    (tmp_path / "temporary").mkdir()
    command = [sys.executable, "-c", FAMILY, str(tmp_path)]
    with kept(command, tmp_path / "temporary", os.environ, tmp_path) as process:
        processes = family(tmp_path)
        assert process.poll() is None
    assert process.returncode == 0
    assert all(map(gone, processes))
    assert (tmp_path / "temporary").exists()


def test_nothing_outlives_the_command(tmp_path: Path) -> None:
    with kept(
        [sys.executable, "-c", FAMILY, str(tmp_path)], tmp_path, os.environ, tmp_path
    ) as process:
        processes = family(tmp_path)
        processes[-1].kill()
        assert process.wait() == 128 + signal.SIGKILL
        assert all(map(gone, processes))


def test_killed_keeper_ends_only_token_holders(tmp_path: Path) -> None:
    with kept(
        [sys.executable, "-c", FAMILY, str(tmp_path)], tmp_path, os.environ, tmp_path
    ) as process:
        processes = family(tmp_path)
        orphan = processes[NAMES.index("orphan")]
        process.kill()
        process.wait()
        assert not any(map(gone, processes))
    try:
        # The orphan has another environment without the token, so only the keeper knew it.
        assert all(map(gone, [one for one in processes if one != orphan]))
    finally:
        orphan.kill()


def test_exit_code_is_the_keeper_s(tmp_path: Path) -> None:
    with kept(
        [sys.executable, "-c", "raise SystemExit(7)"], tmp_path, os.environ, tmp_path
    ) as process:
        assert process.wait() == 7


def test_what_the_command_writes_can_be_read(tmp_path: Path) -> None:
    streams = {"stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    with kept(
        [sys.executable, "-c", "print('one'); print('two')"],
        tmp_path,
        os.environ,
        tmp_path,
        **streams,
    ) as process:
        assert list(process.stdout) == ["one\n", "two\n"]


def test_command_hears_interrupts_in_background(tmp_path: Path) -> None:
    """Shells start background processes with SIGINT ignored.

    Flower's processes end each other with SIGINT.
    """
    shows = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with kept(
            [sys.executable, "-c", shows],
            tmp_path,
            os.environ,
            tmp_path,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout.read() == "True\n"
    finally:
        signal.signal(signal.SIGINT, before)


def test_only_what_carries_the_token_is_found() -> None:
    started = [
        subprocess.Popen([sys.executable, "-c", SLEEPS], env={**os.environ, TOKEN: token})
        for token in ("a" * 32, "b" * 32)
    ]
    try:
        eventually(lambda: [one.pid for one in carrying("a" * 32)] == [started[0].pid])
        assert carrying("") == []
        end_all(lambda: carrying("a" * 32), 3.0)
        assert started[0].wait() == -signal.SIGTERM
        assert started[1].poll() is None
    finally:
        for process in started:
            process.kill()
            process.wait()


def test_an_interrupt_does_not_break_off_an_end() -> None:
    with uninterrupted():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(os.getpid(), number)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_only_first_interrupt_is_put_off() -> None:
    with interrupted_later() as noted:
        signal.raise_signal(signal.SIGINT)
        assert noted == [signal.SIGINT]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_the_keeper_imports_nothing_of_espalier() -> None:
    """The keeper then starts at once and from any directory."""
    assert "import espalier" not in Path(process_keeper.__file__).read_text()
    assert "from espalier" not in Path(process_keeper.__file__).read_text()
