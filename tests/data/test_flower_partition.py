"""Partitioners of flwr-datasets by name, compared with flwr-datasets used directly."""

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from espalier.data.client_files import client_files
from espalier.data.client_items import client_items
from espalier.data.client_text import split_passages
from espalier.data.files import corpus_index
from espalier.data.files.files import TextRows
from espalier.data.flower_partition import FlowerPartition, values_of
from espalier.errors import EspalierError
from espalier.seeds import derive_seed
from espalier.settings.node import simulated_node
from espalier.settings.run import RunSettings, parse
from espalier.settings.tables.data import DataSettings
from tests.data.client_passages import run_on

CLIENTS = 4
WARDS = ["surgery", "eye", "heart", "skin", "ear"]
SEED = derive_seed(0, "partition")


@pytest.fixture
def library() -> Any:
    return pytest.importorskip(
        "flwr_datasets.partitioner", reason="the extra 'partitioners' is not installed"
    )


def record(number: int) -> dict[str, Any]:
    """Return a note of two passages."""
    text = f"note {number} of the ward\n\nmore of note {number}"
    return {
        "note": text,
        "ward": WARDS[(7 * number + number // 3) % 5],
        "patient": f"p{number // 6 % 9}",
    }


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "notes.jsonl"
    path.write_text("".join(json.dumps(record(number)) + "\n" for number in range(80)))
    return path


def data(file: Path, name: str, arguments: str = "", **more: Any) -> DataSettings:
    return DataSettings(
        source="files", path=str(file), field="note", partition=f"flwr:{name}",
        partition_arguments=arguments, **more,
    )  # fmt: skip


def numbers_of(chosen: DataSettings, client: int, num_clients: int = CLIENTS) -> set[int]:
    """Return the numbers of the records of which a client has passages."""
    own, held_out = split_passages(run_on(chosen, num_clients), simulated_node(), client)
    texts = [*own, *held_out]
    numbers = {int(text.partition("note ")[2].split()[0]) for text in texts}
    # A record is not divided among clients.
    assert len(texts) == 2 * len(numbers)
    return numbers


def direct(partitioner: Any, client: int) -> set[int]:
    """Return the numbers of the records that flwr-datasets gives to a client."""
    from datasets import Dataset

    rows = [{**record(number), "number": number} for number in range(80)]
    partitioner.dataset = Dataset.from_list(rows)
    return set(partitioner.load_partition(client)["number"])


@pytest.mark.parametrize(
    ("name", "arguments", "given"),
    [
        (
            "PathologicalPartitioner",
            "num_classes_per_partition=2",
            {"num_classes_per_partition": 2},
        ),
        (
            "PathologicalPartitioner",
            "num_classes_per_partition=2, class_assignment_mode='deterministic', seed=7",
            {"num_classes_per_partition": 2, "class_assignment_mode": "deterministic", "seed": 7},
        ),
        (
            "DirichletPartitioner",
            "alpha=[0.5, 1, 2, 0.7], min_partition_size=1",
            {"alpha": [0.5, 1, 2, 0.7], "min_partition_size": 1},
        ),
        ("ShardPartitioner", "num_shards_per_partition=2", {"num_shards_per_partition": 2}),
    ],
)
def test_labels_are_divided_as_by_flwr_datasets(
    library: Any, file: Path, name: str, arguments: str, given: dict[str, Any]
) -> None:
    chosen = data(file, name, arguments, partition_field="ward")
    kind = getattr(library, name)
    common = {"num_partitions": CLIENTS, "partition_by": "ward", "seed": SEED}
    for client in range(CLIENTS):
        expected = direct(kind(**(common | given)), client)
        assert numbers_of(chosen, client) == expected
        assert numbers_of(chosen, client) == expected


def test_partitioners_without_labels_divide_plain_text(library: Any, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n\n".join(f"note {number} end" for number in range(40)))
    chosen = DataSettings(path=str(tmp_path / "a.txt"), partition="flwr:LinearPartitioner")
    shares = []
    for client in range(CLIENTS):
        parts = split_passages(run_on(chosen, CLIENTS), simulated_node(), client)
        shares.append([int(text.split()[1]) for part in parts for text in part])
    assert sorted(map(len, shares)) == [4, 8, 12, 16]
    assert sorted(chain.from_iterable(shares)) == list(range(40))


def test_groups_are_never_divided(library: Any, file: Path) -> None:
    chosen = data(file, "GroupedNaturalIdPartitioner", "group_size=2", group="patient")
    kind = library.GroupedNaturalIdPartitioner
    for client in range(CLIENTS):
        partitioner = kind(partition_by="patient", group_size=2)
        assert numbers_of(chosen, client) == direct(partitioner, client)
    with pytest.raises(EspalierError, match=r"divides a group of data\.group among clients"):
        numbers_of(data(file, "IidPartitioner", group="patient"), 0)


def test_items_of_a_task_have_labels(library: Any, tmp_path: Path) -> None:
    rows = [{"sentence": f"fine {n}", "label": n % 2} for n in range(40)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run: RunSettings = parse(
        {
            "method": "fedpetuning", "task.name": "sst2", "num-clients": 2,
            "data.path": str(tmp_path / "a.jsonl"),
            "data.partition": "flwr:PathologicalPartitioner",
            "data.partition-arguments": (
                "num_classes_per_partition=1, class_assignment_mode='deterministic'"
            ),
        }
    )  # fmt: skip
    for client in range(2):
        train, held_out = client_items(run, simulated_node(), client)
        assert len(train) + len(held_out) == 20
        assert {item.answer for item in train} == {client}


def test_a_field_labels_items_of_a_task_without_labels(library: Any, tmp_path: Path) -> None:
    rows = [
        {"prompt": f"say {n}", "completion": f"fine {n}", "topic": ("oak", "elm")[n % 2]}
        for n in range(40)
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run: RunSettings = parse(
        {
            "method": "fedpetuning", "task.name": "chat", "num-clients": 2,
            "data.path": str(tmp_path / "a.jsonl"),
            "data.partition": "flwr:NaturalIdPartitioner", "data.partition-field": "topic",
        }
    )  # fmt: skip
    for client in range(2):
        items = [item for part in client_items(run, simulated_node(), client) for item in part]
        numbers = {int(item.prompt.split()[-1]) for item in items}
        assert len(items) == 20
        assert len({number % 2 for number in numbers}) == 1


def test_stored_index_gives_the_same_partition(
    library: Any, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ESPALIER_STATE_DIR", str(tmp_path / "state"))
    chosen = data(
        file, "PathologicalPartitioner", "num_classes_per_partition=2", partition_field="ward"
    )
    expected = [numbers_of(chosen, client) for client in range(CLIENTS)]
    monkeypatch.setattr(corpus_index, "LARGE_BYTES", 0)
    monkeypatch.setattr(corpus_index, "ROWS_AT_ONCE", 7)
    assert [numbers_of(chosen, client) for client in range(CLIENTS)] == expected


@pytest.mark.parametrize(
    ("name", "arguments", "more", "told"),
    [
        ("PathologicPartitioner", "", {}, "has no such partitioner of records; choose one of Con"),
        ("Partitioner", "", {}, "has no such partitioner"),
        (
            "PathologicalPartitioner", "", {"partition_field": "ward"},
            r"missing 1 required .*'num_classes_per_partition'; correct data\.partition-arguments"
            r" \(there are: num_classes_per_partition, class_assignment_mode, shuffle, seed\)",
        ),
        (
            "PathologicalPartitioner", "num_classes_per_partition=9", {"partition_field": "ward"},
            "ValueError: The specified `num_classes_per_partition`=9 is greater than",
        ),
        ("IidPartitioner", "alpha=1", {}, r"unexpected .*'alpha'; correct .* \(there are: none\)"),
        ("DirichletPartitioner", "alpha=1", {}, r"needs a label for each record; name the field"),
        ("SizePartitioner", "partition_sizes=[40, 40]", {}, "makes 2 partitions, but num-clients"),
        ("VerticalEvenPartitioner", "", {}, "has no such partitioner"),
    ],
)  # fmt: skip
def test_mistakes_are_told(
    library: Any, file: Path, name: str, arguments: str, more: dict[str, Any], told: str
) -> None:
    chosen = data(file, name, arguments, **more)
    with pytest.raises(EspalierError, match=told) as caught:
        numbers_of(chosen, 0)
    assert str(caught.value).startswith(f"data.partition = 'flwr:{name}': ")


def test_missing_library_is_named(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "flwr_datasets", None)
    monkeypatch.setitem(__import__("sys").modules, "flwr_datasets.partitioner", None)
    with pytest.raises(EspalierError, match=r"pip install -e '\.\[partitioners\]'"):
        numbers_of(data(file, "IidPartitioner"), 0)


def test_numbers_keep_their_order() -> None:
    assert values_of(["10", "2", "1.5"]).tolist() == [10, 2, 1.5]
    assert values_of(["b", "10", "a"]).tolist() == [2, 0, 1]
    for same in (["1", "1.0"], ["nan", "1"]):
        assert sorted(values_of(same).tolist()) == [0, 1]


def test_site_s_own_file_is_not_divided(file: Path) -> None:
    chosen = data(file, "IidPartitioner")
    assert isinstance(
        client_files(run_on(chosen, 2), simulated_node(), 0, TextRows).partition, FlowerPartition
    )
    node = simulated_node(data_path=str(file))
    assert client_files(run_on(chosen, 2), node, 0, TextRows).partition is None


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"data.partition": "pathological"}, "choose one of iid, .*, quantity or flwr:NAME"),
        ({"data.partition-arguments": "alpha:1"}, r"is not TOML \(.*\); write name=value"),
        ({"data.partition-arguments": "num_partitions=3"}, "num_partitions cannot be set here"),
        (
            {"data.group": "patient", "data.partition-field": "ward"},
            "data.partition-field = 'ward': with data.group a partitioner gets the groups",
        ),
    ],
)
def test_settings_are_checked(changes: dict[str, Any], told: str) -> None:
    flat = {"data.path": "a.jsonl", "data.partition": "flwr:IidPartitioner"}
    with pytest.raises(EspalierError, match=told):
        parse(flat | changes)


def test_arguments_are_read_only_by_partitioners() -> None:
    flat = {"data.path": "a.jsonl", "data.partition-arguments": "alpha=1"}
    parse(flat | {"data.partition": "flwr:IidPartitioner"}, by_hand=flat)
    told = r"data.partition = 'iid' does not read it; .* choose data.partition = 'flwr:NAME'"
    with pytest.raises(EspalierError, match=told):
        parse(flat, by_hand=flat)
