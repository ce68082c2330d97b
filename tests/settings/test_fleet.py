"""Fleets: the packaged ones against the paper, random draws, and errors in a fleet file."""

from collections import Counter
from pathlib import Path

import pytest

from espalier.errors import EspalierError
from espalier.settings.tables.fleet import Conditions, Fleet, read_fleet

CONF = Path(__file__).parents[2] / "conf" / "devices"
SMALL = """
mode-rounds = 2
[kinds.fast]
teraflops = 20
modes = [1.0, 0.5, 0.25]
[kinds.slow]
teraflops = 1.0
modes = [1.0]
[places.near]
megabits = [10, 30]
[places.far]
megabits = [1.0, 2.0]
[[devices]]
kind = "fast"
place = "near"
count = 2
[[devices]]
kind = "slow"
count = 4
"""


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return read(tmp_path, SMALL)


def read(folder: Path, text: str) -> Fleet:
    path = folder / "fleet.toml"
    path.write_text(text)
    return read_fleet(path)


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("low", {"agx": 10}),
        ("medium", {"agx": 5, "nx": 5}),
        ("high", {"agx": 3, "nx": 3, "tx2": 4}),
        ("full", {"tx2": 30, "nx": 40, "agx": 10}),
    ],
)
def test_the_papers_fleets(name: str, kinds: dict[str, int]) -> None:
    """Sections 5.1 and 5.3 of the paper: the TX2 has 4 modes, the others have 8.

    The fastest mode is 100 times as fast as the slowest.
    """
    found = read_fleet(CONF / f"{name}.toml")
    counts: Counter[str] = Counter()
    for group in found.devices:
        counts[group.kind] += group.count
    assert dict(counts) == kinds
    assert {kind: len(own.modes) for kind, own in found.kinds.items()} == {
        k: 4 if k == "tx2" else 8 for k in kinds
    }
    assert found.mode_rounds == 20
    conditions = [
        found.drawn(0, device, number) for device in range(found.size) for number in (1, 21, 41)
    ]
    assert all(1e6 <= own.bits_per_second <= 30e6 for own in conditions)
    if "tx2" in kinds:
        slowest, fastest = (found.kinds[k].teraflops * m for k, m in (("tx2", 0.165), ("agx", 1.0)))
        assert min(found.kinds["tx2"].modes) == 0.165
        assert fastest / slowest == pytest.approx(100, rel=0.01)


def test_testbed_stands_at_four_distances() -> None:
    found = read_fleet(CONF / "full.toml")
    members = [group for group in found.devices for _ in range(group.count)]
    assert Counter(found._places(3, members)) == {"2m": 20, "8m": 20, "14m": 20, "20m": 20}
    assert found._places(3, members) != found._places(4, members)


def speeds_of(conditions: list[Conditions]) -> list[float]:
    return [one.operations_per_second for one in conditions]


def test_what_is_drawn(fleet: Fleet) -> None:
    assert fleet.size == 6
    drawn = {
        number: [fleet.drawn(7, device, number) for device in range(6)] for number in range(1, 41)
    }
    for own in drawn.values():
        for device, one in enumerate(own):
            speeds = (20e12, 10e12, 5e12) if device < 2 else (1e12,)
            assert one.operations_per_second in speeds
        assert all(10e6 <= one.bits_per_second < 30e6 for one in own[:2])
        assert sum(one.bits_per_second >= 10e6 for one in own[2:]) == 2
    for number in range(1, 40, 2):
        assert speeds_of(drawn[number]) == speeds_of(drawn[number + 1])
    assert {own[0].operations_per_second for own in drawn.values()} == {20e12, 10e12, 5e12}
    assert len({own[0].bits_per_second for own in drawn.values()}) == 40
    assert fleet.drawn(7, 1, 9) == drawn[9][1], "whatever was drawn before"
    assert fleet.drawn(8, 1, 9) != drawn[9][1]


def test_more_clients_than_devices_are_refused(fleet: Fleet) -> None:
    fleet.require(6)
    with pytest.raises(EspalierError, match="num-clients = 7: the fleet has 6 devices"):
        fleet.require(7)


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("teraflops = 20", "teraflops = -1", "kinds.fast.teraflops = -1: "),
        ("teraflops = 20", 'teraflops = "a"', "kinds.fast.teraflops = 'a': "),
        ("teraflops = 20", "", "kinds.fast.teraflops: has to be given"),
        ("[1.0, 0.5, 0.25]", "[1.0, 1.5]", r"kinds.fast.modes = \[1.0, 1.5\]: modes are shares"),
        ("[1.0, 0.5, 0.25]", "[]", "kinds.fast.modes = "),
        (
            "megabits = [10, 30]",
            "megabits = [30, 10]",
            "megabits are the least and the most, from 1e-06 to 1e[+]06",
        ),
        ("megabits = [10, 30]", "megabits = [nan, 10]", "places.near.megabits.0 = nan: "),
        ("megabits = [10, 30]", "megabits = [1e-320, 1e-310]", "from 1e-06 to"),
        ("count = 2", "count = 0", "devices.0.count = 0: "),
        ("count = 2", "count = 2\ncolour = 1", "devices.0.colour: unknown key"),
        ("mode-rounds = 2", "mode-rounds = 0", "mode-rounds = 0: "),
        (
            "mode-rounds = 2",
            "mode-round = 2",
            "mode-round: unknown key; did you mean 'mode-rounds'",
        ),
        ('kind = "slow"', 'kind = "snail"', "devices.1.kind = 'snail': known are fast, slow"),
        ('place = "near"', 'place = "here"', "devices.0.place = 'here': known are any, near, far"),
        (
            "[places.far]",
            "[places.any]",
            "places.any: devices whose place is any rotate through all places; rename it",
        ),
        ("mode-rounds = 2", "mode-rounds", "is not TOML"),
    ],
)
def test_a_wrong_file_is_told_by_file_and_key(
    tmp_path: Path, old: str, new: str, text: str
) -> None:
    with pytest.raises(EspalierError, match=text) as caught:
        read(tmp_path, SMALL.replace(old, new, 1))
    assert "fleet.toml" in str(caught.value)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(
        EspalierError, match=r"there is no .*missing\.toml; see conf/devices for examples"
    ):
        read_fleet(tmp_path / "missing.toml")
    with pytest.raises(EspalierError, match="cannot be read"):
        read_fleet(tmp_path)
