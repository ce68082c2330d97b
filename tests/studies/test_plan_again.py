"""Estimates that are made again and stored with earlier measurements."""

from pathlib import Path

import pytest

from benchmarks.plan import __main__ as study
from benchmarks.reporting.rows import Rows


def test_planned_seconds_keep_original_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Estimated seconds and all measurements stay; other estimates are replaced."""
    rows = Rows(tmp_path / "plan.csv", study.KEYS, study.FIGURES, {})
    rows.add({"model": "demo", "method": "flap"}, **dict.fromkeys(study.FIGURES, 1.0))
    new = [name for name in study.FIGURES if not name.endswith("_measured")]
    monkeypatch.setattr(study, "planned", lambda _: dict.fromkeys(new, 2.0))
    study.again(rows, {"demo": "demo"})
    expected = {
        name: "2" if name in new and name != "seconds_planned" else "1" for name in study.FIGURES
    }
    assert {name: rows.rows[0][name] for name in study.FIGURES} == expected
    again = Rows(rows.path, study.KEYS, study.FIGURES, {})
    assert again.rows == rows.rows
