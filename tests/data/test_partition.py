"""Partition of records: disjoint, complete, repeatable, and as uneven as requested."""

import json
from collections import Counter
from itertools import compress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.data.files.records import Record
from espalier.data.partition import Kind, Partition, point_of
from espalier.data.passages import digest, is_held_out
from espalier.errors import EspalierError
from espalier.settings.node import simulated_node
from espalier.settings.tables.data import DataSettings
from tests.data.client_passages import client_passages
from tests.data.plain_partition import share_of

KINDS: tuple[Kind, ...] = ("iid", "by-field", "dirichlet", "quantity")
RECORDS = [Record(f"record {number} of the ward", f"ward-{number % 5}") for number in range(1500)]


def chosen(partition: Partition, client: int, records: list[Record]) -> list[Record]:
    labels = list(dict.fromkeys(record.label for record in records))
    points = np.array([point_of(digest(record.text)) for record in records], np.uint64)
    numbers = np.array([labels.index(record.label) for record in records], np.uint32)
    return list(compress(records, partition.chooser(client, labels)(points, numbers)))


def shares(kind: Kind, clients: int, alpha: float = 0.5, seed: int = 0) -> list[list[Record]]:
    partition = Partition(kind, clients, alpha, seed)
    return [chosen(partition, client, RECORDS) for client in range(clients)]


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(KINDS),
    st.integers(1, 12),
    st.sampled_from([0.01, 0.5, 100.0]),
    st.integers(0, 5),
)
def test_shares_are_disjoint_and_complete(
    kind: Kind, clients: int, alpha: float, seed: int
) -> None:
    dealt = [record for share in shares(kind, clients, alpha, seed) for record in share]
    assert Counter(dealt) == Counter(RECORDS)


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_of_the_file_does_not_matter(kind: Kind) -> None:
    partition = Partition(kind, 4, 0.5, 1)
    assert chosen(partition, 2, RECORDS) == chosen(partition, 2, RECORDS[::-1])[::-1]
    assert chosen(partition, 2, RECORDS) == share_of(partition, 2, RECORDS)


def test_iid_shares_are_alike_in_size_and_labels() -> None:
    for share in shares("iid", 5):
        assert 230 < len(share) < 370
        assert {record.label for record in share} == {f"ward-{number}" for number in range(5)}


def test_by_field_gives_whole_labels_in_turn() -> None:
    labels = [{record.label for record in share} for share in shares("by-field", 3)]
    assert labels == [{"ward-0", "ward-3"}, {"ward-1", "ward-4"}, {"ward-2"}]


def unevenness(kind: Kind, alpha: float) -> float:
    """Return the mean fraction of a label that the largest client holds.

    The mean is over three labels and five seeds.
    """
    largest = []
    for seed in range(5):
        counts = [
            Counter(record.label for record in share) for share in shares(kind, 5, alpha, seed)
        ]
        largest += [
            max(count[label] for count in counts) / 300 for label in ("ward-0", "ward-1", "ward-2")
        ]
    return sum(largest) / len(largest)


@pytest.mark.parametrize("kind", ["dirichlet", "quantity"])
def test_smaller_alpha_gives_more_uneven_shares(kind: Kind) -> None:
    assert unevenness(kind, 0.05) > 0.8
    assert unevenness(kind, 1000.0) < 0.3


def test_dirichlet_skews_labels_quantity_does_not() -> None:
    """Quantity skew keeps the mix of labels about equal at each client; Dirichlet skew does not."""
    (large,) = sorted(shares("quantity", 3, 0.5, 3), key=len)[-1:]
    mix = Counter(record.label for record in large)
    assert max(mix.values()) < 1.5 * min(mix.values())
    labels = [Counter(record.label for record in share) for share in shares("dirichlet", 3, 0.1, 3)]
    assert any(
        max(count.values()) > 5 * min(count[f"ward-{n}"] for n in range(5)) for count in labels
    )


def test_shares_differ_between_seeds() -> None:
    assert shares("dirichlet", 3, 0.5, 1) != shares("dirichlet", 3, 0.5, 2)


def test_records_are_partitioned_by_field(tmp_path: Path) -> None:
    file = tmp_path / "notes.jsonl"
    file.write_text(
        "\n".join(
            json.dumps({"note": record.text, "ward": number % 2})
            for number, record in enumerate(RECORDS)
        )
    )
    data = DataSettings(
        source="files", path=str(file), field="note", partition="by-field", partition_field="ward"
    )
    for client in range(2):
        own = set(client_passages(data, simulated_node(), client, 2))
        assert own == {
            record.text
            for number, record in enumerate(RECORDS)
            if number % 2 == client and not is_held_out(record.text)
        }


def test_record_without_label_is_refused_unquoted(tmp_path: Path) -> None:
    file = tmp_path / "notes.jsonl"
    file.write_text('{"text": "hawthorn", "ward": 1}\n{"text": "hazel"}\n')
    data = DataSettings(
        source="files", path=str(file), partition="dirichlet", partition_field="ward"
    )
    with pytest.raises(EspalierError, match="line 2 has no field 'ward'") as refused:
        client_passages(data, simulated_node(), 0, 2)
    assert "hazel" not in str(refused.value)


def test_by_file_assigns_one_file_per_client(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        (tmp_path / f"{name}.txt").write_text(
            "\n\n".join(f"{name} {number}" for number in range(30))
        )
    data = DataSettings(source="files", path=str(tmp_path), partition="by-file")
    first = client_passages(data, simulated_node(), 0, 3)
    assert first
    assert all(passage.startswith("a ") for passage in first)
    with pytest.raises(
        EspalierError, match="a directory with 4 files, one per client; this one has 3"
    ):
        client_passages(data, simulated_node(), 0, 4)
