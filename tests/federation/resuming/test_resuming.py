"""Resumption of damaged or edited run directories.

A run is refused with a reason or resumed to the same bytes.

"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message

from espalier.errors import EspalierError
from espalier.messages.records import read
from espalier.storage.atomic import sealed
from server_app.preflight import open_all
from tests.bench import Bench, Killed
from tests.federation.resuming.interrupted_runs import METHODS, Interrupted, interrupted


@pytest.fixture(scope="module", params=sorted(METHODS))
def killed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Interrupted:
    return interrupted(tmp_path_factory.mktemp(request.param), request.param)


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
            match=(
                rf"{Path(name).name}: has version 1, but this program reads version \d;"
                " resume with the release"
            ),
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
