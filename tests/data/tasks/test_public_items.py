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
            "data.source": "jsonl",
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
        "data.source": "jsonl",
        "data.path": "unused",
    }
    with pytest.raises(EspalierError, match=r"empty.jsonl: the file is empty"):
        public_items(parse({"method": "fedpetuning"} | keys))
