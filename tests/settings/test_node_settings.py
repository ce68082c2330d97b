"""Settings of a node: the values that its owner may give, and the errors for wrong ones."""

import os
from pathlib import Path
from typing import Any

import pytest

from espalier.errors import EspalierError
from espalier.settings.node import NodeSettings, claimed_name, parse_node


def mistake_lines(config: dict[str, object]) -> list[str]:
    with pytest.raises(EspalierError) as caught:
        parse_node(config)
    heading, *lines = str(caught.value).splitlines()
    assert heading == "the node's configuration is wrong:"
    return [line.strip() for line in lines]


def test_a_site_name_is_enough() -> None:
    assert parse_node({"site": "hospital-a"}).site == "hospital-a"


def test_partition_id_names_an_unnamed_site() -> None:
    assert parse_node({"partition-id": 7, "num-partitions": 8}).site == "node-00007"


def test_nameless_node_is_told_remedy() -> None:
    (line,) = mistake_lines({})
    assert "--node-config" in line


@pytest.mark.parametrize("name", ["Hospital A", "a/b", "a;b", "ä", "x" * 65, "a\n"])
def test_name_unfit_as_a_file_name_is_refused(name: str) -> None:
    (line,) = mistake_lines({"site": name})
    assert line.startswith(f"site = {name!r}: ")


def test_min_tokens_of_2048_is_the_default() -> None:
    assert parse_node({"site": "a"}).fewest_tokens() == 2048
    assert parse_node({"site": "a", "min-tokens": 300}).fewest_tokens() == 300
    assert parse_node({"partition-id": 0}, simulated=True).fewest_tokens() == 1
    assert parse_node({"partition-id": 0, "min-tokens": 50}, simulated=True).fewest_tokens() == 50


def test_partition_id_makes_no_simulated_node() -> None:
    node = parse_node({"partition-id": 0, "num-partitions": 2})
    assert not node.simulated
    assert not node.allows_own_text()
    assert node.fewest_tokens() == 2048
    assert node.most("max_runs") == 100


@pytest.mark.parametrize("key", ["simulated", "_simulated"])
def test_no_key_makes_a_node_simulated(key: str) -> None:
    (line,) = mistake_lines({"site": "a", key: True})
    assert "unknown key" in line


def test_limits_default_except_when_simulated() -> None:
    node = parse_node({"site": "a", "max-steps": 5, "allowed-methods": "fedprllm, hetlora"})
    assert (node.most("max_steps"), node.most("max_samples"), node.most("max_rounds")) == (
        5,
        4096,
        1000,
    )
    assert node.max_threads() == max(8, os.cpu_count() or 1)
    assert [node.allows_method(name) for name in ("fedprllm", "hetlora", "fedspallm")] == [
        True,
        True,
        False,
    ]
    assert parse_node({"site": "a"}).allows_method("fedspallm")
    simulated = parse_node({"site": "a", "max-steps": 5}, simulated=True)
    assert (simulated.most("max_steps"), simulated.most("max_runs"), simulated.max_threads()) == (
        5,
        None,
        None,
    )


def test_a_method_that_does_not_exist_is_named() -> None:
    (line,) = mistake_lines({"site": "a", "data-path": __file__, "data-task": "completon"})
    assert line.startswith("data-task = 'completon': input should be 'text', 'sst2'")
    (line,) = mistake_lines({"site": "a", "allowed-methods": "fedprllm,fedavg"})
    assert line.startswith("allowed-methods = 'fedprllm,fedavg': fedavg is not a method")


@pytest.mark.parametrize("name", [".", ".."])
def test_a_name_that_leads_elsewhere_is_refused(name: str) -> None:
    (line,) = mistake_lines({"site": name})
    assert line == f"site = '{name}': is not a file name; give the site another name"


def test_all_mistakes_at_once_one_line_each() -> None:
    lines = mistake_lines({"site": "a", "threads": -1, "device": "tpu", "data_pth": "x"})
    assert sorted(line.split()[0].rstrip(":") for line in lines) == [
        "data_pth",
        "device",
        "threads",
    ]


def test_a_misspelt_key_is_met_with_the_right_one() -> None:
    assert mistake_lines({"site": "a", "data-pth": "x"}) == [
        "data-pth: unknown key; did you mean 'data-path'?"
    ]


@pytest.mark.parametrize("key", ["data-path", "model-path"])
def test_a_path_that_does_not_exist_is_named(key: str, tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    (line,) = mistake_lines({"site": "a", key: missing})
    assert line.startswith(f"{key} = {missing!r}: does not exist")


@pytest.mark.parametrize("key", ["data-path", "model-path", "state-dir"])
@pytest.mark.parametrize(
    "path", ["x" * 300, "/" + "x/" * 3000, "a\x00b", "~nobody-of-this-name/x", "\ud800"]
)
def test_what_can_be_no_path_is_told_in_words(key: str, path: str, tmp_path: Path) -> None:
    (line,) = mistake_lines({"site": "a", key: path})
    assert line.startswith(f"{key} = ")
    assert "on this node" in line
    assert len(line) < 500


def test_a_directory_of_state_need_not_exist_yet(tmp_path: Path) -> None:
    assert parse_node({"site": "a", "state-dir": str(tmp_path / "later")}).state_dir


def test_missing_paths_and_name_are_told_together() -> None:
    assert len(mistake_lines({"data-path": "/no/such", "model-path": "/no/such"})) == 3


def test_missing_path_and_value_are_told_together() -> None:
    assert len(mistake_lines({"site": "a", "data-path": "/no/such", "threads": -1})) == 2


def test_a_path_that_exists_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("x")
    assert parse_node({"site": "a", "data-path": str(file)}).data_path == str(file)


def test_private_state_is_where_the_owner_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ESPALIER_STATE_DIR", str(tmp_path / "environment"))
    assert NodeSettings(state_dir=str(tmp_path / "own")).state_root() == tmp_path / "own"
    assert NodeSettings().state_root() == tmp_path / "environment"


def test_overlong_state_directory_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deep = "/" + "x/" * 1791 + "x"
    assert len(deep) == 3584
    assert parse_node({"site": "a", "state-dir": deep}).state_root() == Path(deep)
    with pytest.raises(
        EspalierError,
        match=r"state-dir = '/x.*\.\.\.': is 3586 bytes long.*name a directory of at most 3584",
    ):
        parse_node({"site": "a", "state-dir": deep + "/x"})
    monkeypatch.setenv("ESPALIER_STATE_DIR", deep + "/x")
    with pytest.raises(EspalierError, match=r"ESPALIER_STATE_DIR = .*is 3586 bytes long"):
        NodeSettings().state_root()
    monkeypatch.setenv("ESPALIER_STATE_DIR", "~nobody-of-this-name/x")
    with pytest.raises(EspalierError, match="ESPALIER_STATE_DIR = '~nobody-of-this-name/x': "):
        NodeSettings().state_root()


def test_state_defaults_to_home_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("ESPALIER_STATE_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert NodeSettings().state_root() == tmp_path / ".espalier"


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"site": "hospital-c", "widows": 16}, "hospital-c"),
        ({"site": "hospital-c", "partition-id": 2, "num-samples": "many"}, "hospital-c"),
        ({"partition-id": 2, "ste": "hospital-c"}, "node-00002"),
        ({"site": "ward\n7", "partition-id": 2}, ""),
        ({"site": ".."}, ""),
        ({"site": 7}, ""),
        ({"partition-id": "2"}, ""),
        ({"partition-id": True}, ""),
        ({"partition-id": -1}, ""),
        ({}, ""),
    ],
)
def test_name_is_read_from_invalid_configuration(config: dict[str, Any], name: str) -> None:
    assert claimed_name(config) == name
