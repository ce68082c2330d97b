"""Runs whose directory is removed while they work; the error says what remains."""

import shutil
from pathlib import Path

import pytest
from flwr.app import Message

from espalier.errors import EspalierError
from espalier.messages.message import Kind
from espalier.messages.records import read
from strategies.base.run_folder import RunFolder
from tests.bench import Bench


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setenv("ESPALIER_STATE_DIR", str(tmp_path / "state"))
    return Bench(tmp_path, "fedprllm", {"evaluation.local-baseline": True}, num_clients=2)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("kind", ["enrol", "train", "evaluate"])
def test_what_remains_is_named(bench: Bench, kind: Kind, again: bool) -> None:
    """The error is the same if another directory has the old name in the meantime."""
    grid = bench.grid()
    lineage = list[str]()

    def remove(message: Message) -> None:
        header = read(message.content).header
        if header.kind == kind and not lineage:
            lineage.append(header.lineage)
            (folder,) = (bench.folder / "runs").iterdir()
            shutil.rmtree(folder)
            if again:
                folder.mkdir()

    grid.before_push = remove
    with pytest.raises(
        EspalierError,
        match="was removed or moved while the run was working; the run cannot continue",
    ) as caught:
        bench.run(grid)
    told = str(caught.value)
    state = bench.folder / "state"
    for place in (state / lineage[0], *state.glob(f"egress/{lineage[0]}-*")):
        assert (f"state of its clients remains in {place}; remove it" in told) == place.exists()
    assert kind == "enrol" or f"{state / lineage[0]};" in told
    assert ("is in a new directory" in told) == bool(list((bench.folder / "runs").iterdir()))


def test_run_removed_before_its_end_fails(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "server_app.app.Summary.take_figures",
        lambda *_: shutil.rmtree(next((bench.folder / "runs").iterdir())),
    )
    with pytest.raises(EspalierError, match="was removed or moved"):
        bench.run()


def test_a_directory_is_known_by_what_it_is(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.metrics.append({"event": "a"})
    (tmp_path / "run").rename(tmp_path / "other")
    (tmp_path / "run").mkdir()
    assert not folder.is_there()
    with pytest.raises(EspalierError, match="was removed or moved"):
        folder.metrics.append({"event": "b"})
    assert not list((tmp_path / "run").iterdir())
