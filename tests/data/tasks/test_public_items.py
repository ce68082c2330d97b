"""Public test items: taken at even distances and never trained on.

At even distances, a sorted file gives items of every class.
"""

import json
from pathlib import Path

import pytest

from espalier.data.client_items import public_items
from espalier.errors import EspalierError
from espalier.settings.run import parse


@pytest.mark.parametrize(
    ("most", "wanted"), [(0, 7), (7, 7), (9, 7), (5, 5), (4, 4), (2, 2), (1, 1)]
)
def test_as_many_as_asked_for_at_even_distances(tmp_path: Path, most: int, wanted: int) -> None:
    file = tmp_path / "sorted.jsonl"
    file.write_text(
        "".join(
            json.dumps({"sentence": f"{place} ", "label": int(place >= 4)}) + "\n"
            for place in range(7)
        )
    )
    settings = parse(
        {
            "method": "fedpetuning",
            "task.name": "sst2",
            "task.test-path": str(file),
            "task.max-test-items": most,
            "data.source": "files",
            "data.path": "unused",
        }
    )
    places = [int(item.texts[0]) for item in public_items(settings)]
    assert len(places) == wanted
    assert places[0] == 0
    gaps = [later - earlier for earlier, later in zip(places, [*places[1:], 7], strict=True)]
    assert max(gaps) - min(gaps) <= 1


def test_a_file_without_items_is_a_mistake(tmp_path: Path) -> None:
    file = tmp_path / "empty.jsonl"
    file.write_text("\n")
    keys = {
        "task.name": "sst2",
        "task.test-path": str(file),
        "data.source": "files",
        "data.path": "unused",
    }
    with pytest.raises(EspalierError, match=r"empty.jsonl: the file is empty"):
        public_items(parse({"method": "fedpetuning"} | keys))


def asked_of_the_hub(monkeypatch: pytest.MonkeyPatch, **data: str) -> list[str]:
    """Return the splits that are loaded for the public test items of sst2.

    The task's own test split is "validation".
    """
    datasets = pytest.importorskip("datasets", reason="the extra 'hub' is not installed")
    asked: list[str] = []
    found = datasets.Dataset.from_list([{"sentence": "tree", "label": 1}])
    monkeypatch.setattr(
        datasets, "load_dataset", lambda name, config, split: asked.append(split) or found
    )
    keys = {f"data.{key}".replace("_", "-"): value for key, value in data.items()}
    public_items(parse({"method": "fedpetuning", "task.name": "sst2", "data.source": "hub"} | keys))
    return asked


@pytest.mark.parametrize(
    "split",
    [
        "validation",
        "validation[:50%]",
        "train + validation",
        "train+validation[50%:](closest)",
        "all",
    ],
)
@pytest.mark.parametrize("path", ["", "trees"])
def test_training_on_test_split_is_refused(
    monkeypatch: pytest.MonkeyPatch, split: str, path: str
) -> None:
    with pytest.raises(EspalierError) as caught:
        asked_of_the_hub(monkeypatch, hub_split=split, path=path)
    assert (
        str(caught.value)
        == f"data.hub-split = {split!r}: 'validation' contains the public test items of the"
        " task sst2, and clients must not train on them; choose another split, or name other test"
        " items in task.test-path"
    )


@pytest.mark.parametrize("split", ["", "train", "validation_matched", "train[:50%]+test"])
def test_they_train_on_any_other(monkeypatch: pytest.MonkeyPatch, split: str) -> None:
    assert asked_of_the_hub(monkeypatch, hub_split=split) == ["validation"]


def test_test_split_trains_beside_own_test_file(tmp_path: Path) -> None:
    file = tmp_path / "items.jsonl"
    file.write_text('{"sentence": "tree", "label": 1}\n')
    flat = {
        "method": "fedpetuning",
        "task.name": "sst2",
        "data.source": "hub",
        "data.hub-split": "validation",
    }
    assert len(public_items(parse(flat | {"task.test-path": str(file)}))) == 1
