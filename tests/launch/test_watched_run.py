"""Output and end of ``espalier run``.

The run is interrupted or loses its SuperLink, or Ctrl-C comes after its end.
"""

import json
import shlex
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from espalier.cli.command import main
from espalier.errors import FLOWER_REPORTS_IT_TOO
from espalier.flower.run_command import RunCommand
from espalier.launch.addresses import free_port
from espalier.launch.run import WatchedRun
from espalier.launch.superlink import SuperLink, SuperLinkLost, running_superlink

APP = Path(__file__).parent.parent.parent
WORDS = ["run", "two-sites", "seed=3", "--app", str(APP)]


class Scripted:
    """SuperLink with a scripted log and scripted answers; scripted exceptions are raised."""

    def __init__(self, folder: Path, log: list[Any], statuses: list[Any], own: bool) -> None:
        self.folder = folder
        self.process = object() if own else None
        self.log = log
        self.statuses = statuses
        self.stopped = False

    def start_run(self, *_: object) -> str:
        return "1"

    def stream_log(self, _: str) -> Iterator[str]:
        for line in self.log:
            yield _given(line)

    def status(self, _: str) -> tuple[str, str]:
        return _given(self.statuses.pop(0)), "details"

    def stop_run(self, _: str) -> None:
        self.stopped = True


def _given(value: Any) -> Any:
    if isinstance(value, BaseException | type):
        raise value
    return value


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, Scripted]]:
    """Return a function that runs the command with a scripted SuperLink.

    It returns the exit code and the SuperLink.
    """

    def give(
        log: list[Any], statuses: list[Any], *words: str, end: Any = None
    ) -> tuple[int, Scripted]:
        own = "--superlink" not in words
        superlink = Scripted(tmp_path, log, statuses, own)

        @contextmanager
        def opened(*_: object) -> Iterator[Scripted]:
            yield superlink
            if end is not None:
                raise end

        monkeypatch.setattr(
            (
                "espalier.launch.run.own_superlink"
                if own
                else "espalier.launch.run.running_superlink"
            ),
            opened,
        )
        return main([*WORDS, *words]), superlink

    return give


def a_run(folder: Path, status: str) -> str:
    """Return the log line that names a run directory with this status."""
    folder.mkdir(exist_ok=True)
    (folder / "summary.json").write_text(json.dumps({"status": status}))
    return f"run directory {folder}\n"


def test_interrupt_tells_resume_command(
    run: Callable[..., tuple[int, Scripted]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "runs of mine"
    code, superlink = run([a_run(directory, "failed"), KeyboardInterrupt], [], "resume-from=old")
    assert code == 130
    # The command's own SuperLink ends with all its processes.
    assert not superlink.stopped
    told = capsys.readouterr().err.splitlines()
    assert f"finished rounds are in {directory}; to resume after the last one:" in told[-2]
    assert shlex.split(told[-1]) == ["espalier", *WORDS, f"resume-from={directory}"]


def test_early_interrupt_repeats_command(
    run: Callable[..., tuple[int, Scripted]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["starting\n", KeyboardInterrupt], [])[0] == 130
    assert "the run had not started; give the same command again" in capsys.readouterr().err


@pytest.mark.parametrize("own", [True, False])
def test_interrupt_after_result_is_no_failure(
    run: Callable[..., tuple[int, Scripted]],
    tmp_path: Path,
    own: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = () if own else ("--superlink", "h:1")
    log = [a_run(tmp_path / "run", "completed"), KeyboardInterrupt]
    assert run(log, ["finished:stopped"], *words)[0] == 0
    told = capsys.readouterr()
    assert "resume-from" not in told.err
    # The user is in a hurry.
    assert "measur" not in told.out


def test_interrupt_while_stopping_is_no_failure(
    run: Callable[..., tuple[int, Scripted]],
) -> None:
    assert run([], ["finished:completed"], end=KeyboardInterrupt())[0] == 0
    assert run([], ["finished:failed"], end=KeyboardInterrupt())[0] == 130


def test_remote_run_is_stopped_at_its_superlink(
    run: Callable[..., tuple[int, Scripted]], tmp_path: Path
) -> None:
    """The run's directory is on another machine."""
    log = [f"run directory {tmp_path / 'elsewhere'}\n", KeyboardInterrupt]
    code, superlink = run(log, ["finished:stopped"], "--superlink", "h:1")
    assert (code, superlink.stopped) == (130, True)
    assert run(log, ["finished:completed"], "--superlink", "h:1")[0] == 0


def test_interrupt_at_submission_stops_run(
    run: Callable[..., tuple[int, Scripted]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The command waits for the run's ID.

    A second interrupt ends the wait and prints where to look.
    """

    def interrupted(times: int) -> Callable[..., str]:
        def start_run(*_: object) -> str:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
            return "1"

        return start_run

    monkeypatch.setattr(Scripted, "start_run", interrupted(1))
    code, superlink = run(["never read"], ["finished:stopped"], "--superlink", "h:1")
    assert (code, superlink.stopped) == (130, True)
    assert "never read" not in capsys.readouterr().out
    monkeypatch.setattr(Scripted, "start_run", interrupted(2))
    code, superlink = run([], [], "--superlink", "h:1")
    assert (code, superlink.stopped) == (130, False)
    assert "interrupted before the SuperLink confirmed the run; flwr ls" in capsys.readouterr().err
    monkeypatch.setattr(Scripted, "start_run", interrupted(1))
    # The command's own SuperLink ends anyway.
    code, superlink = run([], [])
    assert (code, superlink.stopped) == (130, False)


def test_a_lost_superlink_is_told_in_words(
    run: Callable[..., tuple[int, Scripted]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = [a_run(tmp_path / "run", "failed")]
    assert run(log, [SuperLinkLost("the SuperLink of this run was killed (signal 9)")])[0] == 1
    told = capsys.readouterr().err
    assert "espalier: the SuperLink of this run was killed (signal 9)\n" in told
    assert f"resume-from={tmp_path / 'run'}" in told


def test_silently_lost_serverapp_is_resumable(
    run: Callable[..., tuple[int, Scripted]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = a_run(tmp_path / "run", "failed")
    assert run([line], ["finished:failed"])[0] == 1
    assert f"resume-from={tmp_path / 'run'}" in capsys.readouterr().err
    assert run([line, f"{FLOWER_REPORTS_IT_TOO}\n"], ["finished:failed"])[0] == 1
    assert "resume-from" not in capsys.readouterr().err


def test_unreachable_superlink_counts_as_lost(tmp_path: Path) -> None:
    """The answer is that of the real ``flwr ls``."""
    address = f"127.0.0.1:{free_port()}"
    with running_superlink(address, None) as superlink:
        told = (
            f"the SuperLink at {address} does not answer, or lost the run: .*\nif it was killed,"
            " start it again with the same"
        )
        with pytest.raises(SuperLinkLost, match=told):
            superlink.status("1")


class Ended:
    """Process of the command's own SuperLink after its end."""

    def __init__(self, code: int) -> None:
        self.code = code

    def wait(self, _: float) -> int:
        return self.code


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (137, r"was killed \(signal 9\) before the run had ended"),
        (3, r"ended with exit code 3 .* of its log:\nno port\n"),
    ],
)
def test_what_became_of_one_s_own_superlink(
    tmp_path: Path, code: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "superlink.log").write_text("no port\n")
    superlink = SuperLink({}, tmp_path, f"127.0.0.1:{free_port()}", Ended(code))  # type: ignore[arg-type]
    monkeypatch.setattr(
        RunCommand, "_ask", lambda *_: {"success": False, "error-message": "unavailable"}
    )
    with pytest.raises(SuperLinkLost, match=told):
        superlink.status("1")


@pytest.mark.parametrize("content", ["", "{", "[]", '{"status": 3}'])
def test_empty_summary_is_not_completed(tmp_path: Path, content: str) -> None:
    watched = WatchedRun("", str, directory=str(tmp_path))
    assert not watched.completed
    (tmp_path / "summary.json").write_text(content)
    assert not watched.completed
