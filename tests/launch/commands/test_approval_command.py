"""``espalier approve`` and ``espalier check-log``: options, output and exit codes."""

from pathlib import Path
from typing import Any

import pytest

from client_app.policy.egress_log import egress_log
from client_app.policy.egress_log import main as check_log
from espalier.cli.command import main
from espalier.storage.hash_chain import chain_check


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """Create a state directory of two sites and two runs with three logs."""
    for lineage, site in (("run-1", "a"), ("run-1", "b"), ("run-2", "a")):
        log = egress_log(tmp_path / "state", lineage, site)
        for day in (1, 2, 3):
            log.append(
                {"entry": "reply", "time": f"2026-01-0{day}T12:00:00+00:00", "bytes": 1000 * day}
            )
    return tmp_path / "state"


def check(where: Path, *heads: str) -> int:
    return check_log({"where": str(where), "heads": list(heads)})


def test_whole_logs_are_summarised(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(state) == 0
    lines = capsys.readouterr().out.splitlines()
    path = state / "egress" / "run-1-a.jsonl"
    assert lines[:4] == [
        str(path),
        "  run run-1, site a",
        (
            "  3 entries (3 replies), 2026-01-01T12:00:00+00:00 to 2026-01-03T12:00:00+00:00; 6,000"
            " bytes left"
        ),
        f"  intact   head {chain_check(path).head}",
    ]
    assert len(lines) == 3 * 4
    assert check(path) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_broken_log_names_its_first_bad_line(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = state / "egress" / "run-1-b.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"bytes":2000', b'"bytes":2001'))
    assert check(state) == 1
    shown = capsys.readouterr().out
    assert "  BROKEN   line 2: does not match its own hash: it was changed" in shown
    assert "  intact up to entry 1, " in shown
    assert shown.count("  intact   head ") == 2


def test_torn_lines_have_a_code_of_their_own(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Torn lines are reported for ever, also after further entries."""
    path = state / "egress" / "run-1-b.jsonl"
    first, *others = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + b"".join(line[:9] + b"\n" for line in others))
    assert check(state) == 1
    egress_log(state, "run-1", "b").append({"entry": "reply", "bytes": 1})
    assert check(state) == 3
    assert "lines 2 to 3: are incomplete: " in capsys.readouterr().out
    (state / "egress" / "run-2-a.jsonl").write_bytes(b"garbage\n")
    assert check(state) == 1


def test_a_log_in_the_place_of_another_is_told(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A copy elsewhere may have any name."""
    folder = state / "egress"
    copy = state / "kept.jsonl"
    copy.write_bytes((folder / "run-2-a.jsonl").read_bytes())
    assert check(copy) == 0
    (folder / "run-2-a.jsonl").replace(folder / "run-1-b.jsonl")
    assert check(state) == 1
    assert "  RENAMED  belongs to another run or site than its name says" in capsys.readouterr().out


def test_logs_of_a_run_directory_have_the_names_of_their_sites(state: Path) -> None:
    run = state.parent / "run"
    (run / "egress").mkdir(parents=True)
    (run / "summary.json").touch()
    log = state / "egress" / "run-2-a.jsonl"
    (run / "egress" / "egress-a.jsonl").write_bytes(log.read_bytes())
    assert check(run) == 0
    (run / "egress" / "egress-a.jsonl").rename(run / "egress" / "egress-b.jsonl")
    assert check(run) == 1


def test_log_contents_cannot_steer_terminal(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    egress_log(state, "run-3", "a").append({"entry": "re\x1b[2Jply", "time": "\x1b[31mnow"})
    assert check(state) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "re?[2Jply" in shown


def test_noted_hash_reveals_a_truncated_log(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = state / "egress" / "run-2-a.jsonl"
    noted = chain_check(path).head
    egress_log(state, "run-2", "a").append({"entry": "reply", "bytes": 1})
    assert check(state, noted) == 0
    assert (
        "  the noted hash is that of entry 3 of 4: no entry up to it is missing"
        in capsys.readouterr().out
    )
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2]))
    # The log itself does not show that its end is missing.
    assert check(state) == 0
    assert check(state, noted) == 1
    assert f"no entry has the noted hash {noted}" in capsys.readouterr().out
    path.unlink()
    assert check(state, noted) == 1


@pytest.mark.parametrize("head", ["5d0f", "x" * 64, ""])
def test_what_is_no_hash_is_told(
    state: Path, capsys: pytest.CaptureFixture[str], head: str
) -> None:
    assert check(state, head) == 2
    assert "give all 64 characters that check-log printed after 'head'" in capsys.readouterr().err


def test_a_noted_hash_may_have_large_letters(state: Path) -> None:
    assert check(state, chain_check(state / "egress" / "run-2-a.jsonl").head.upper()) == 0


def test_unreadable_log_hides_no_broken_one(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (state / "egress" / "run-0-a.jsonl").mkdir()
    broken = state / "egress" / "run-2-a.jsonl"
    broken.write_bytes(b"".join(broken.read_bytes().splitlines(keepends=True)[1:]))
    assert check(state) == 1
    shown = capsys.readouterr()
    assert "run-0-a.jsonl: cannot be read" in shown.err
    assert "BROKEN" in shown.out


def test_an_empty_log_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "log.jsonl").touch()
    assert check(tmp_path / "log.jsonl") == 2
    assert "EMPTY    the log has no entry" in capsys.readouterr().out


def test_where_no_log_is_that_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for where in (tmp_path, tmp_path / "none"):
        assert check(where) == 2
        assert f"check-log: {where}: is not an egress log" in capsys.readouterr().err


def test_the_words_of_the_commands_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def run_in_app(app: Path, module: str, document: Any) -> int:
        asked.append((module, document))
        return 3

    monkeypatch.setattr("espalier.launch.app.run_in_app", run_in_app)
    assert (
        main(["approve", "state", "ab", "--refuse", "cd", "--reason", "too much", "--show", "ef"])
        == 3
    )
    assert main(["approve", "state", "--all"]) == 3
    assert main(["check-log", "state", "--head", "ab", "--head", "cd"]) == 3
    nothing = {
        "state_dir": "state",
        "ids": [],
        "all": False,
        "refuse": [],
        "reason": "",
        "show": [],
    }
    assert asked == [
        (
            "client_app.policy.approval_command",
            nothing | {"ids": ["ab"], "refuse": ["cd"], "reason": "too much", "show": ["ef"]},
        ),
        ("client_app.policy.approval_command", nothing | {"all": True}),
        ("client_app.policy.egress_log", {"where": "state", "heads": ["ab", "cd"]}),
    ]
    with pytest.raises(SystemExit):
        main(["check-log", "state", "--what"])


def test_the_commands_work_as_processes(state: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["check-log", str(state)]) == 0
    assert main(["approve", str(state)]) == 0
    assert capfd.readouterr().out.splitlines()[-1] == f"No reply waits in {state}."
