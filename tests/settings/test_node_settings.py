"""Settings of a node: what its owner may say, and what is told when it is wrong."""

from pathlib import Path

import pytest

from espalier.settings.mistakes import Mistake
from espalier.settings.node import NodeSettings, parse_node, site_id


def mistake_lines(config: dict[str, object]) -> list[str]:
    with pytest.raises(Mistake) as caught:
        parse_node(config)
    heading, *lines = str(caught.value).splitlines()
    assert heading == "the node's configuration is wrong:"
    return [line.strip() for line in lines]


def test_a_site_name_is_enough() -> None:
    assert site_id(parse_node({"site": "hospital-a"})) == "hospital-a"


def test_flowers_partition_id_names_a_site_that_gives_no_name() -> None:
    assert site_id(parse_node({"partition-id": 7, "num-partitions": 8})) == "node-00007"


def test_a_node_without_any_name_is_told_how_to_give_one() -> None:
    (line,) = mistake_lines({})
    assert "--node-config" in line


@pytest.mark.parametrize("name", ["Hospital A", "a/b", "a;b", "ä", "x" * 65, "a\n"])
def test_a_name_that_could_not_be_a_file_name_is_refused(name: str) -> None:
    (line,) = mistake_lines({"site": name})
    assert line.startswith(f"site = {name!r}: ")


def test_a_round_rests_on_eight_sequences_unless_the_owner_says_otherwise_or_the_site_is_simulated() -> None:
    assert parse_node({"site": "a"}).fewest_samples() == 8
    assert parse_node({"site": "a", "least-samples": 3}).fewest_samples() == 3
    assert parse_node({"partition-id": 0}).fewest_samples() == 1
    assert parse_node({"partition-id": 0, "least-samples": 50}).fewest_samples() == 50


def test_all_mistakes_at_once_one_line_each() -> None:
    lines = mistake_lines({"site": "a", "threads": -1, "device": "tpu", "data-format": "csv", "data_pth": "x"})
    assert sorted(line.split()[0].rstrip(":") for line in lines) == ["data-format", "data_pth", "device", "threads"]


def test_a_misspelt_key_is_met_with_the_right_one() -> None:
    assert mistake_lines({"site": "a", "data-pth": "x"}) == ["data-pth: unknown key; did you mean 'data-path'?"]


@pytest.mark.parametrize("key", ["data-path", "model-path"])
def test_a_path_that_does_not_exist_is_named(key: str, tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    (line,) = mistake_lines({"site": "a", key: missing})
    assert line.startswith(f"{key} = {missing!r}: does not exist")


def test_missing_paths_and_a_missing_name_are_told_together() -> None:
    assert len(mistake_lines({"data-path": "/no/such", "model-path": "/no/such"})) == 3


def test_a_missing_path_is_told_together_with_a_wrong_value() -> None:
    assert len(mistake_lines({"site": "a", "data-path": "/no/such", "threads": -1})) == 2


def test_a_path_that_exists_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("x")
    assert parse_node({"site": "a", "data-path": str(file)}).data_path == str(file)


@pytest.mark.parametrize(
    ("path", "given", "expected"),
    [
        ("a.jsonl", "", "jsonl"),
        ("a.json", "", "jsonl"),
        ("a.txt", "", "text"),
        ("a", "", "text"),
        ("a.txt", "jsonl", "jsonl"),
        ("a.jsonl", "text", "text"),
    ],
)
def test_the_format_is_what_was_said_or_else_by_the_files_ending(path: str, given: str, expected: str) -> None:
    assert NodeSettings(data_path=path, data_format=given).file_format() == expected  # type: ignore[arg-type]


def test_private_state_is_where_the_owner_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ESPALIER_STATE_DIR", str(tmp_path / "environment"))
    assert NodeSettings(state_dir=str(tmp_path / "own")).state_root() == tmp_path / "own"
    assert NodeSettings().state_root() == tmp_path / "environment"


def test_private_state_is_in_the_home_directory_otherwise(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("ESPALIER_STATE_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert NodeSettings().state_root() == tmp_path / ".espalier"
