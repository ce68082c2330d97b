"""Passages of one client."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from espalier.data.builtin import documentation
from espalier.data.client_text import client_samples
from espalier.data.passages import split
from espalier.errors import EspalierError
from espalier.settings.node import simulated_node
from espalier.settings.run import parse
from espalier.settings.tables.data import DataSettings
from tests.data.client_passages import client_passages

NODE = simulated_node()
PASSAGES = [f"passage number {index}" for index in range(200)]


@pytest.fixture
def shared_file(tmp_path: Path) -> str:
    path = tmp_path / "all.txt"
    path.write_text("\n\n".join(PASSAGES))
    return str(path)


@pytest.fixture
def three_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the documentation by three sources with 60 passages each."""
    monkeypatch.setattr(documentation, "SOURCES", ("a", "b", "c"))
    monkeypatch.setattr(
        documentation, "texts", lambda source: [f"{source} {index}" for index in range(60)]
    )


def held_out(passages: list[str]) -> set[str]:
    return set(split(passages)[1])


# ----- one file for all clients -------------------------------------------------------------------


@pytest.mark.parametrize("clients", [1, 2, 7])
def test_dealing_out_a_file_is_a_partition(shared_file: str, clients: int) -> None:
    data = DataSettings(source="files", path=shared_file)
    shares = [client_passages(data, NODE, client, clients) for client in range(clients)]
    dealt = Counter(passage for share in shares for passage in share)
    assert set(dealt.values()) == {1}
    assert set(dealt) == set(PASSAGES) - held_out(PASSAGES)
    assert all(shares)


def test_assignment_depends_on_passage_alone(shared_file: str, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("\n\n".join(["new one", *PASSAGES[::-1]]))
    before = client_passages(DataSettings(source="files", path=shared_file), NODE, 1, 4)
    after = client_passages(DataSettings(source="files", path=str(other)), NODE, 1, 4)
    assert set(before) == set(after) - {"new one"}


def test_json_lines_are_dealt_out_by_passage(tmp_path: Path) -> None:
    path = tmp_path / "all.jsonl"
    path.write_text("\n".join(json.dumps({"body": passage}) for passage in PASSAGES))
    data = DataSettings(source="files", path=str(path), field="body")
    shares = [client_passages(data, NODE, client, 3) for client in range(3)]
    assert sorted(passage for share in shares for passage in share) == sorted(
        set(PASSAGES) - held_out(PASSAGES)
    )


# ----- a file per client --------------------------------------------------------------------------


def test_rank_placeholder_in_path_is_replaced(tmp_path: Path) -> None:
    for client in range(3):
        (tmp_path / f"client-{client}.txt").write_text(
            "\n\n".join(f"{passage} of {client}" for passage in PASSAGES[:30])
        )
    data = DataSettings(source="files", path=str(tmp_path / "client-{client}.txt"))
    for client in range(3):
        own = {f"{passage} of {client}" for passage in PASSAGES[:30]}
        assert set(client_passages(data, NODE, client, 3)) == own - held_out(sorted(own))


def test_a_missing_file_of_a_rank_is_named(tmp_path: Path) -> None:
    data = DataSettings(source="files", path=str(tmp_path / "client-{client}.txt"))
    with pytest.raises(EspalierError, match=r"client-5.txt: no such file"):
        client_passages(data, NODE, 5, 8)


# ----- a site's own file --------------------------------------------------------------------------


def test_site_s_own_file_takes_precedence_whole(shared_file: str) -> None:
    node = simulated_node(data_path=shared_file)
    assert set(client_passages(DataSettings(), node, 3, 8)) == set(PASSAGES) - held_out(PASSAGES)


def test_a_sites_own_field_comes_before_the_runs(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text(
        "\n".join(json.dumps({"text": "not this", "note": passage}) for passage in PASSAGES)
    )
    node = simulated_node(data_path=str(path), data_field="note")
    assert set(client_passages(DataSettings(), node, 0, 1)) == set(PASSAGES) - held_out(PASSAGES)


# ----- documentation ------------------------------------------------------------------------------


@pytest.mark.usefixtures("three_sources")
def test_each_client_has_a_source_of_its_own() -> None:
    for client, source in enumerate("abc"):
        own = {f"{source} {index}" for index in range(60)}
        assert set(client_passages(DataSettings(), NODE, client, 3)) == own - held_out(sorted(own))


@pytest.mark.usefixtures("three_sources")
@pytest.mark.parametrize("clients", [4, 5, 6, 8])
def test_clients_of_one_source_do_not_overlap(clients: int) -> None:
    shares = [client_passages(DataSettings(), NODE, client, clients) for client in range(clients)]
    dealt = Counter(passage for share in shares for passage in share)
    everything = [f"{source} {index}" for source in "abc" for index in range(60)]
    assert set(dealt.values()) == {1}
    assert set(dealt) == set(everything) - held_out(everything)
    for client, share in enumerate(shares):
        assert {passage[0] for passage in share} == {"abc"[client % 3]}


# ----- calibration samples ------------------------------------------------------------------------


def letters(text: str) -> list[int]:
    return list(text.encode())


def test_windows_have_set_shape_and_own_tokens(shared_file: str) -> None:
    settings = parse(
        {
            "num-clients": 2,
            "data.source": "files",
            "data.path": shared_file,
            "data.num-samples": 3,
            "data.sequence-length": 40,
        }
    )
    samples = client_samples(settings, NODE, letters, 1)
    own = "\n\n".join(client_passages(settings.data, NODE, 1, 2))
    assert (samples.shape, samples.dtype) == ((3, 40), torch.int64)
    assert all(bytes(sample).decode() in own for sample in samples.tolist())


def test_windows_depend_on_seed_and_client(
    shared_file: str,
) -> None:
    def drawn(seed: int, client: int) -> list[list[int]]:
        settings = parse({"seed": seed, "data.num-samples": 4, "data.sequence-length": 32})
        return client_samples(
            settings, simulated_node(data_path=shared_file), letters, client
        ).tolist()

    assert drawn(1, 0) == drawn(1, 0)
    assert drawn(1, 0) != drawn(2, 0)
    assert drawn(1, 0) != drawn(1, 1)


def test_no_window_holds_a_held_out_passage(shared_file: str) -> None:
    settings = parse({"data.num-samples": 50, "data.sequence-length": 64})
    text = "".join(
        bytes(sample).decode()
        for sample in client_samples(
            settings, simulated_node(data_path=shared_file), letters, 0
        ).tolist()
    )
    assert held_out(PASSAGES)
    for passage in held_out(PASSAGES):
        assert f"{passage}\n" not in text


def test_invalid_unicode_record_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text('{"text": "cut off \\ud83d"}\n')
    with pytest.raises(EspalierError):
        client_passages(DataSettings(), simulated_node(data_path=str(path)), 0, 1)


def test_site_without_any_data_path_is_refused() -> None:
    with pytest.raises(
        EspalierError,
        match=r"data-path: neither this site nor the run's data.path names a file; set data-path",
    ):
        client_passages(DataSettings(source="files"), NODE, 0, 2)
