"""Resumption of damaged or edited run directories.

A run is refused with a reason or resumed to the same bytes. One server works in a directory at a
time.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from espalier.errors import EspalierError
from espalier.hf.opening.opened import OpenedModel
from espalier.messages.records import read
from espalier.settings.run import parse
from espalier.storage.atomic import sealed
from espalier.storage.directory_lock import locked
from server_app.preflight import open_all
from server_app.run_directory import require_run_directory
from tests.bench import LOCAL_ONLY, Bench, Killed, model_files, results
from tests.in_process import InProcessGrid

METHODS: dict[str, dict[str, Any]] = {
    "fedprllm": {"fedprllm.strategy": "iterative"},
    "fedspallm": {"federation.rounds": 2, "fedspallm.schedule": "linear"},
    "pooled-pruning": {"pooled-pruning.strategy": "iterative"},
    "fedpetuning": {
        "federation.rounds": 2,
        "federation.wire-dtype": "bfloat16",
        "training.steps": 2,
        "lora.rank": 2,
    },
    "hetlora": {
        "federation.rounds": 2,
        "hetlora.ranks": "1,2",
        "training.steps": 2,
        "lora.rank": 2,
    },
}
"""Settings of methods with two rounds each."""


@dataclass(repr=False)
class Interrupted:
    """Run of two rounds that was killed before evaluation, with its expected results."""

    bench: Bench
    run: Path
    state: Path
    expected: dict[str, bytes]

    def again(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """Copy the run directory, with the clients' private state as it was then."""
        run = Path(shutil.copytree(self.run, folder / "runs" / self.run.name))
        monkeypatch.setenv("ESPALIER_STATE_DIR", str(shutil.copytree(self.state, folder / "state")))
        return run

    def resume(self, run: Path) -> dict[str, bytes]:
        self.bench.run(self.bench.grid(), resume_from=str(run))
        return results(run)


def interrupted(folder: Path, method: str) -> Interrupted:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("ESPALIER_STATE_DIR", str(folder / "state"))
        bench = Bench(folder, method, METHODS[method] | LOCAL_ONLY, num_clients=2)
        whole = bench.run()
        run = bench.killed(lambda header: header.kind == "evaluate")
        return Interrupted(bench, run, folder / "state", results(whole))


@pytest.fixture(scope="module", params=sorted(METHODS))
def killed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Interrupted:
    return interrupted(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def one_killed(tmp_path_factory: pytest.TempPathFactory) -> Interrupted:
    return interrupted(tmp_path_factory.mktemp("one"), "fedprllm")


# ----- damage, remains and remedy -----------------------------------------------------------------


def test_earlier_checkpoint_gives_the_same_bytes(
    killed: Interrupted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = killed.again(tmp_path, monkeypatch)
    last = run / "checkpoint" / "state.json"
    before = run / "checkpoint" / "previous.json"
    document = json.loads(last.read_text())
    assert (document["round"], json.loads(before.read_text())["round"]) == (2, 1)
    last.write_text(json.dumps({**document, "round": 1}))
    told = (
        f"state.json: is damaged: .*; the checkpoint after round 1 is intact: move {before} to"
        f" {last} and resume again"
    )
    with pytest.raises(EspalierError, match=told):
        killed.resume(run)
    before.replace(last)
    assert killed.resume(run) == killed.expected


def test_behind_a_damaged_blob_too(
    killed: Interrupted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = killed.again(tmp_path, monkeypatch)
    last = run / "checkpoint" / "state.json"
    before = run / "checkpoint" / "previous.json"
    of_last, of_before = (set(json.loads(file.read_text())["blobs"]) for file in (last, before))
    blob = run / "checkpoint" / "blobs" / f"{min(of_last - of_before)}.blob"
    blob.write_bytes(blob.read_bytes()[:-1])
    told = (
        f"damaged or missing: {blob.name}, of {len(of_last)} blobs of the checkpoint after round"
        " 2; the others are intact; "
    )
    with pytest.raises(EspalierError, match=told + "the checkpoint after round 1 is intact: move"):
        killed.resume(run)
    before.replace(last)
    assert killed.resume(run) == killed.expected


def test_checkpoint_names_all_blobs_it_needs(killed: Interrupted) -> None:
    """Damage is then found before any further round is computed."""
    document = json.loads((killed.run / "checkpoint" / "state.json").read_text())
    hashes = {path.stem for path in (killed.run / "checkpoint" / "blobs").iterdir()}
    assert set(document["blobs"]) == {text for text in _texts(document["state"]) if text in hashes}


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for inner in (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    ):
        yield from _texts(inner)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (
            lambda folder: (folder / "previous.json").unlink(),
            "no earlier round remains: restore .*state.json from a backup",
        ),
        (
            lambda folder: (folder / "previous.json").write_text("{"),
            "no intact checkpoint remains .*previous.json: is damaged",
        ),
        (
            lambda folder: [blob.unlink() for blob in (folder / "blobs").iterdir()],
            "the checkpoint after round 1 needs damaged blobs too: restore",
        ),
    ],
)
def test_what_no_longer_remains_is_not_promised(
    damage: Callable[[Path], Any],
    told: str,
    one_killed: Interrupted,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = one_killed.again(tmp_path, monkeypatch)
    (run / "checkpoint" / "state.json").write_text("")
    damage(run / "checkpoint")
    with pytest.raises(
        EspalierError, match=f"state.json: is damaged: it is not a JSON document; {told}"
    ):
        one_killed.resume(run)


def test_missing_checkpoint_is_no_fresh_start(
    one_killed: Interrupted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = one_killed.again(tmp_path, monkeypatch)
    (run / "checkpoint" / "state.json").unlink()
    with pytest.raises(
        EspalierError, match=r"state\.json: is missing; the checkpoint after round 1 is intact"
    ):
        one_killed.resume(run)


def test_earlier_versions_are_refused_in_words(
    one_killed: Interrupted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = one_killed.again(tmp_path, monkeypatch)
    for name in ("checkpoint/state.json", "run.json"):
        whole = (run / name).read_bytes()
        document = {key: value for key, value in json.loads(whole).items() if key != "sha256"}
        (run / name).write_bytes(sealed(document | {"version": 1}))
        with pytest.raises(
            EspalierError,
            match=rf"{Path(name).name}: has version 1, but this program reads version \d; resume with the release",
        ):
            one_killed.resume(run)
        (run / name).write_bytes(whole)


def test_a_damaged_run_json_is_named(
    one_killed: Interrupted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = one_killed.again(tmp_path, monkeypatch)
    (run / "run.json").write_text(
        (run / "run.json").read_text().replace('"lineage": "2', '"lineage": "3')
    )
    with pytest.raises(
        EspalierError,
        match=r"run.json: is damaged: .* start a new run with the settings of .*settings.toml",
    ):
        one_killed.resume(run)


def test_the_summary_decides_nothing(
    one_killed: Interrupted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = one_killed.again(tmp_path, monkeypatch)
    (run / "summary.json").write_text('{"status": "completed"')
    assert one_killed.resume(run) == one_killed.expected
    document = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(document | {"status": "failed"}))
    with pytest.raises(EspalierError, match="the run is completed"):
        one_killed.resume(run)


# ----- before the end of the first round ----------------------------------------------------------


def test_site_keeps_its_rank_after_early_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of three sites arrives only at the resumption.

    Its name precedes that of a site that has already worked.
    """
    monkeypatch.setenv("ESPALIER_STATE_DIR", str(tmp_path / "state"))
    bench = Bench(tmp_path, "fedprllm", {"quorum": 0.5}, num_clients=3)
    grid = bench.grid()
    (late,) = [
        node for node, context in grid.contexts.items() if context.node_config["partition-id"] == 1
    ]
    del grid.contexts[late]

    def kill(request: Message, reply: Message) -> Message:
        # The client has finished its work.
        if read(request.content).header.kind == "train":
            raise Killed
        return reply

    grid.tamper[2] = kill
    with pytest.raises(Killed):
        bench.run(grid)
    (run,) = (tmp_path / "runs").iterdir()
    last = run / "checkpoint" / "state.json"
    whole = last.read_text()
    assert json.loads(whole)["round"] == 0
    last.write_text(whole.replace('": 1', '": 2'))
    for resume in (bench.run, lambda **changes: open_all(bench.config(**changes), pytest.fail)):
        with pytest.raises(EspalierError, match=r"state.json: is damaged"):
            resume(resume_from=str(run))
    last.write_text(whole)
    bench.run(resume_from=str(run))
    clients = json.loads((run / "summary.json").read_text())["clients"]
    assert [(client["client"], client["site"], client["status"]) for client in clients] == [
        (0, "node-00000", "completed"),
        (1, "node-00002", "completed"),
    ]


# ----- before the start ---------------------------------------------------------------------------


def looked_at(one_killed: Interrupted, **changes: Any) -> None:
    """Open everything that ``espalier run`` checks before it starts a run."""
    open_all(one_killed.bench.config(**changes), lambda line: pytest.fail(line))


def remains(run: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(run)): file.read_bytes()
        for file in sorted(run.rglob("*"))
        if file.is_file()
    }


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda run: (run / "run.json").unlink(), "resume-from = .* is not a run directory"),
        (lambda run: (run / "run.json").write_text("{"), "run.json: is damaged"),
        (
            lambda run: (run / "checkpoint" / "state.json").write_text("{"),
            "state.json: is damaged.* round 1 is intact",
        ),
        (
            lambda run: min((run / "checkpoint" / "blobs").iterdir()).write_text("x"),
            "damaged or missing: .*.blob",
        ),
        (
            lambda run: shutil.rmtree(run / "checkpoint"),
            "checkpoint: is missing or empty, but metrics.jsonl lists finished",
        ),
        (lambda run: (run / "seconds.json").write_text("{"), "seconds.json: is damaged"),
    ],
)
def test_impossible_resumption_is_told_early(
    damage: Callable[[Path], Any],
    told: str,
    one_killed: Interrupted,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = one_killed.again(tmp_path, monkeypatch)
    damage(run)
    before = remains(run)
    with pytest.raises(EspalierError, match=told):
        looked_at(one_killed, resume_from=str(run))
    assert remains(run) == before


def test_run_without_checkpoint_does_not_restart(
    one_killed: Interrupted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = one_killed.again(tmp_path, monkeypatch)
    shutil.rmtree(run / "checkpoint")
    with pytest.raises(
        EspalierError, match=r"metrics\.jsonl lists finished rounds; restore it from a backup"
    ):
        one_killed.resume(run)


def test_changed_settings_and_lock_are_told_early(
    one_killed: Interrupted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = one_killed.again(tmp_path, monkeypatch)
    with pytest.raises(
        EspalierError, match="a resumed run keeps its settings, but seed was 0, is 5"
    ):
        looked_at(one_killed, resume_from=str(run), seed=5)
    with locked(run):
        before = remains(run)
        with pytest.raises(EspalierError, match=f"process {os.getpid()} on .* is working there"):
            looked_at(one_killed, resume_from=str(run))
        assert remains(run) == before


def test_out_dir_below_dangling_link_is_told(
    one_killed: Interrupted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_killed.again(tmp_path, monkeypatch)
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(EspalierError, match=r"link is a link to nothing\); name another directory"):
        looked_at(one_killed, out_dir=str(tmp_path / "link" / "runs"))


def test_inspection_holds_and_changes_nothing(
    one_killed: Interrupted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = one_killed.again(tmp_path, monkeypatch)
    before = remains(run)
    settings = parse(one_killed.bench.config(resume_from=str(run)), simulation=True)
    require_run_directory(settings, OpenedModel(one_killed.bench.model))
    assert remains(run) == before
    (run / "lock").unlink()
    require_run_directory(settings, OpenedModel(one_killed.bench.model))
    assert not (run / "lock").exists()


@pytest.mark.parametrize(
    ("below", "told"),
    [
        ("file", "Not a directory"),
        ("file/runs", "Not a directory"),
        ("x" * 300, "File name too long"),
    ],
)
def test_impossible_out_dir_is_told_early(
    one_killed: Interrupted, tmp_path: Path, below: str, told: str
) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(
        EspalierError, match=rf"out-dir = '.*cannot be made \({told}\); name another directory"
    ):
        looked_at(one_killed, out_dir=str(tmp_path / below))


def test_an_out_dir_is_not_made_before(
    one_killed: Interrupted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = parse(one_killed.bench.config(out_dir=str(tmp_path / "a" / "b")), simulation=True)
    require_run_directory(settings, OpenedModel(one_killed.bench.model))
    assert not (tmp_path / "a").exists()
    closed = tmp_path / "closed"
    closed.mkdir()
    # The tests may run as a user who can write everywhere.
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) != closed)
    with pytest.raises(EspalierError, match=r"cannot be made \(Permission denied\)"):
        looked_at(one_killed, out_dir=str(closed / "runs"))


# ----- arbitrary damage to files ------------------------------------------------------------------

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


# ----- one server at a time -----------------------------------------------------------------------


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


# ----- duration -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dies", [False, True])
def test_a_resumed_run_counts_what_it_took_before(
    dies: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each training request takes 100 seconds on a simulated clock.

    Requests of an unfinished round count too. A server that is killed leaves the time of its last
    checkpoint.
    """
    bench = Bench(tmp_path, "fedpetuning", METHODS["fedpetuning"], num_clients=2)

    def tick(message: Message) -> None:
        if read(message.content).header.kind == "train":
            bench.time.seconds += 100.0

    grid = bench.grid()
    again = bench.grid()
    grid.before_push = again.before_push = tick
    with monkeypatch.context() as during:
        if dies:
            during.setattr("server_app.app._note_end", lambda *_: None)
        run = bench.killed(
            lambda header: (header.kind, header.server_round, header.client) == ("train", 2, 1),
            grid,
        )
    before = json.loads((run / "seconds.json").read_text())["run"]
    assert before == pytest.approx(200.0 if dies else 300.0, abs=5.0)
    # The time between the two runs does not count.
    bench.time.seconds += 10_000.0
    bench.run(again, resume_from=str(run))
    assert json.loads((run / "summary.json").read_text())["seconds"] == pytest.approx(
        before + 200.0, abs=5.0
    )
    told = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (resumed,) = [entry["text"] for entry in told if entry["event"] == "resumed"]
    assert (
        resumed == f"resumed      after round 1, {'3 min 20 s' if dies else '5 min'} before it was"
        " interrupted"
    )
