"""Arbitrary damage to files of a run directory, and one server at a time in it."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from espalier.errors import EspalierError
from tests.bench import model_files, results
from tests.federation.resuming.interrupted_runs import Interrupted
from tests.in_process import InProcessGrid

ANY_VALUE = st.sampled_from([None, True, -1, 0, 1, 2, 7, 1.5, "", "x", [], {}, [[]], {"": None}])


def edited(document: Any) -> st.SearchStrategy[Any]:
    """Draw the document with one value, at any depth, replaced or removed."""
    if isinstance(document, dict) and document:
        keys = st.sampled_from(sorted(document))
        inside = keys.flatmap(
            lambda key: edited(document[key]).map(lambda value: {**document, key: value})
        )
        return inside | keys.map(
            lambda key: {name: value for name, value in document.items() if name != key}
        )
    if isinstance(document, list) and document:
        places = st.integers(0, len(document) - 1)
        return places.flatmap(
            lambda i: edited(document[i]).map(
                lambda value: [*document[:i], value, *document[i + 1 :]]
            )
        )
    return ANY_VALUE


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    """Draw other bytes, fewer or more bytes, or another JSON value."""
    place = draw(st.integers(0, len(whole) - 1))
    kind = draw(st.sampled_from(["flip", "cut", "add", "replace", "edit", "edit", "edit"]))
    if kind == "edit" and whole.startswith(b"{"):
        return json.dumps(draw(edited(json.loads(whole))), indent=2).encode() + b"\n"
    if kind == "cut":
        return whole[:place]
    if kind == "add":
        return whole[:place] + draw(st.binary(min_size=1, max_size=3)) + whole[place:]
    if kind == "replace":
        return draw(st.sampled_from([b"", b"null", b"[]", b"{}", b"\xff", b"[" * 50_000]))
    return whole[:place] + bytes([whole[place] ^ 1 << draw(st.integers(0, 7))]) + whole[place + 1 :]


@settings(max_examples=50, phases=[Phase.generate])
@given(data=st.data())
def test_damaged_file_is_told_or_harmless(
    data: st.DataObject, one_killed: Interrupted, tmp_path_factory: pytest.TempPathFactory
) -> None:
    documents = [
        "checkpoint/state.json",
        "checkpoint/state.json",
        "run.json",
        "run.json",
        "summary.json",
    ]
    blobs = [
        str(file.relative_to(one_killed.run))
        for file in sorted(one_killed.run.glob("checkpoint/blobs/*.blob"))
    ]
    name = data.draw(st.sampled_from([*documents, *blobs]))
    with pytest.MonkeyPatch.context() as monkeypatch:
        run = one_killed.again(tmp_path_factory.mktemp("damaged"), monkeypatch)
        whole = (run / name).read_bytes()
        (run / name).write_bytes(data.draw(damaged(whole)) if whole else b"x")
        try:
            found = one_killed.resume(run)
        except EspalierError as mistake:
            told = str(mistake)
        else:
            assert without_blanks(found) == without_blanks(one_killed.expected)
            return
    assert Path(name).name in told


def without_blanks(files: dict[str, bytes]) -> dict[str, Any]:
    """Return the files with ``state.json`` parsed.

    Whitespace in it makes no other checkpoint, and it is not written again after the last round.
    """
    return {
        name: json.loads(data) if name.endswith("state.json") else data
        for name, data in files.items()
    }


def test_extra_blank_in_checkpoint_is_harmless(
    one_killed: Interrupted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = one_killed.again(tmp_path, monkeypatch)
    state = run / "checkpoint" / "state.json"
    state.write_bytes(state.read_bytes() + b" ")
    found = one_killed.resume(run)
    assert found != one_killed.expected
    assert without_blanks(found) == without_blanks(one_killed.expected)


def with_second_server(
    one_killed: Interrupted, run_of: Callable[[], Path]
) -> tuple[InProcessGrid, list[Message]]:
    """Return a grid that resumes the run at its first message, and the messages at which it did."""
    refused = list[Message]()

    def second(message: Message) -> None:
        run = run_of()
        if not refused:
            refused.append(message)
            reason = f"{run.name}: process {os.getpid()} on .* is working there"
            with pytest.raises(EspalierError, match=reason):
                one_killed.resume(run)

    grid = one_killed.bench.grid()
    grid.before_push = second
    return grid, refused


def test_second_server_is_told_who_works_there(
    one_killed: Interrupted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = one_killed.again(tmp_path, monkeypatch)
    before = {file.name: file.read_bytes() for file in run.glob("*.json")}
    grid, refused = with_second_server(one_killed, lambda: run)
    one_killed.bench.run(grid, resume_from=str(run))
    assert refused
    assert results(run) == one_killed.expected
    assert (run / "lock").read_text() == ""
    # The run has ended, and ``run.json`` says so.
    assert (run / "run.json").read_bytes() != before["run.json"]


def test_a_new_run_holds_its_directory_too(
    one_killed: Interrupted,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("ESPALIER_STATE_DIR", str(tmp_path / "state"))
    grid, refused = with_second_server(one_killed, lambda: next((tmp_path / "runs").iterdir()))
    run = one_killed.bench.run(grid, out_dir=str(tmp_path / "runs"))
    assert refused
    # The command finds the directory to resume in this line.
    assert f"run directory {run}\n" in capsys.readouterr().out
    made = model_files(run)
    assert made == {name: data for name, data in one_killed.expected.items() if name in made}
