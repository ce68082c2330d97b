"""Peaks that simulated clients note: the highest counts, and damage counts as none."""

from pathlib import Path

from espalier.storage.client_state import PrivateState
from espalier.storage.peak_memory import FILE, highest_peak, note_peak


def state_of(root: Path, site: str) -> PrivateState:
    return PrivateState(root, "a" * 32, site, {})


def test_the_highest_peak_of_all_clients_counts(tmp_path: Path) -> None:
    assert highest_peak(tmp_path, "a" * 32) == 0
    for site, peaks in {"one": (70, 90, 80), "two": (60,)}.items():
        state = state_of(tmp_path, site)
        state.note_asked()
        for peak in peaks:
            note_peak(state, peak)
    assert highest_peak(tmp_path, "a" * 32) == 90
    assert highest_peak(tmp_path, "b" * 32) == 0
    for damaged in ("{", '{"bytes": "9"}', "[]"):
        (state_of(tmp_path, "one").folder / FILE).write_text(damaged)
        assert highest_peak(tmp_path, "a" * 32) == 60


def test_nothing_is_noted_without_state(tmp_path: Path) -> None:
    note_peak(state_of(tmp_path, "one"), 70)
    assert not (tmp_path / ("a" * 32)).exists()
