"""``min-groups``: the smallest number of patients, authors ... behind an answer of a site."""

import json
from pathlib import Path
from typing import Any

import pytest

from espalier.data import site_data_check
from espalier.data.client_text import client_samples, sample_groups, split_passages
from espalier.data.files.corpus_index import Indexed
from espalier.data.site_data_check import require_enough, require_readable
from espalier.errors import EspalierError
from espalier.settings.node import NodeSettings, parse_node
from espalier.settings.run import RunSettings, parse

PATIENTS = 6


def letters(text: str) -> list[int]:
    """Encode a text with one token per byte."""
    return list(text.encode())


def settings(**changes: Any) -> RunSettings:
    return parse(
        {"data.num-samples": 4, "data.sequence-length": 16}
        | {key.replace("__", ".").replace("_", "-"): changes[key] for key in changes}
    )


def notes(path: Path, texts: list[str], patients: int = PATIENTS) -> Path:
    """Write the notes of patients, in turn."""
    rows = [{"text": text, "patient": f"p{number % patients}"} for number, text in enumerate(texts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def site(path: Path, **keys: Any) -> NodeSettings:
    own = {"data-path": str(path), "data-group": "patient", "min-tokens": 1}
    return parse_node({"site": "a"} | own | {name.replace("_", "-"): keys[name] for name in keys})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return notes(tmp_path / "notes.jsonl", [f"note {number} of a ward" for number in range(90)])


def test_groups_of_samples_are_those_of_their_text(file: Path) -> None:
    node = site(file)
    own, _ = split_passages(settings(), node, 0)
    assert isinstance(own, Indexed)
    text = "\n\n".join(own)
    # The group of each byte; none of a blank line.
    groups: list[int | None] = []
    for passage, group in zip(own, own.label_numbers.tolist(), strict=True):
        groups += [*[group] * len(passage), None, None]
    found = sample_groups(settings(), node, letters, 0, drawn=False)
    assert len(found) == len(text) // 16
    for number, of_sample in enumerate(found):
        whole = {*groups[16 * number : 16 * number + 16]} - {None}
        inner = {*groups[16 * number + 2 : 16 * number + 14]} - {None}
        assert inner <= of_sample <= whole


@pytest.mark.parametrize("bytes_of_a_large_file", [0, 10**6])
@pytest.mark.parametrize("method", ["fedprllm", "fedpetuning", "fedsoda"])
def test_data_of_too_few_groups_is_refused(
    file: Path, method: str, bytes_of_a_large_file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site_data_check, "LARGE", bytes_of_a_large_file)
    more = {"data__num_samples": 40} if method == "fedprllm" else {}
    run = settings(method=method, **more)

    def check(node: NodeSettings) -> None:
        # Clients of FedSODA have no tokenizer when they enrol.
        if method == "fedsoda":
            require_readable(run, node)
        else:
            require_enough(run, node, letters)

    own, _ = split_passages(run, site(file), 0)
    assert isinstance(own, Indexed)
    number = len(set(own.label_numbers.tolist()))
    check(site(file, min_groups=number))
    with pytest.raises(
        EspalierError, match=f"^min-groups = 7: there are {number} groups"
    ) as caught:
        check(site(file, min_groups=7))
    assert caught.value.outward == (
        "min-groups: an answer would be based on fewer groups (data-group); give the site more"
        " data, or its owner lowers min-groups"
    )


def test_samples_of_too_few_groups_are_refused(file: Path) -> None:
    node = site(file, min_groups=3)
    with pytest.raises(EspalierError, match=r"an answer .* raise data\.num-samples or data\.seq"):
        client_samples(settings(data__num_samples=1), node, letters, 0)
    kept = client_samples(settings(data__num_samples=20), node, letters, 0)
    assert kept.equal(client_samples(settings(data__num_samples=20), site(file), letters, 0))


@pytest.mark.parametrize("bytes_of_a_large_file", [0, 10**6])
def test_items_of_too_few_groups_are_refused(
    tmp_path: Path, bytes_of_a_large_file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site_data_check, "LARGE", bytes_of_a_large_file)
    file = tmp_path / "a.jsonl"
    rows = [{"sentence": f"fine {n}", "label": 1, "patient": n % 3} for n in range(30)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = settings(method="fedpetuning", task__name="sst2")
    require_enough(run, site(file, data_task="sst2", min_groups=2), letters)
    with pytest.raises(EspalierError, match=r"^min-groups = 4: there are [23] groups"):
        require_enough(run, site(file, data_task="sst2", min_groups=4), letters)


def test_simulated_clients_have_no_minimum() -> None:
    own = {"site": "a", "data-path": "/", "data-group": "patient", "min-groups": 5}
    assert parse_node(own).fewest_groups() == 5
    assert parse_node(own, simulated=True).fewest_groups() == 0


@pytest.mark.parametrize("own", [{}, {"data-path": "/"}, {"data-group": "patient"}])
def test_groups_need_a_field(own: dict[str, Any]) -> None:
    with pytest.raises(EspalierError, match="min-groups = 5: needs data-path and data-group"):
        parse_node({"site": "a", "min-groups": 5} | own)
