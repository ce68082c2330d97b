"""Figures and tables of studies follow from the measurements that are in the repository."""

import json
import re
import struct
import tomllib
from pathlib import Path

import matplotlib
import pytest
from matplotlib.figure import Figure

from benchmarks.reporting.looks import look_of_arm
from benchmarks.reporting.panels import (
    TITLES,
    Panel,
    Reference,
    Series,
    StudyFigure,
    draw,
    picture,
    title_of,
)
from benchmarks.reports import studies_in, write_again
from espalier.errors import InputError
from espalier.results.style import METHODS, OTHER, STUDY_WIDTH

STUDIES = Path(__file__).parents[2] / "docs" / "studies"
FIGURES = sorted(file.name.removesuffix(".png") for file in STUDIES.glob("*.png"))
NAMES = studies_in(STUDIES)
PINNED = f"matplotlib=={matplotlib.__version__}"
DRAWN_BY_THIS = PINNED in (Path(__file__).parents[2] / "constraints.txt").read_text().splitlines()
"""Whether the figures were drawn by this matplotlib; others place text a little differently."""


def study_of(figure: str) -> str:
    """Return the study that draws a figure: the longest name with which the figure's begins."""
    return max((name for name in NAMES if f"{figure}-".startswith(f"{name}-")), key=len)


@pytest.mark.parametrize("figure", FIGURES)
def test_figure_is_900_pixels_wide_in_both_forms(figure: str) -> None:
    width, height = struct.unpack(">II", (STUDIES / f"{figure}.png").read_bytes()[16:24])
    assert width == STUDY_WIDTH
    svg = (STUDIES / f"{figure}.svg").read_text()
    assert f'width="{width}" height="{height}"' in svg
    sizes = re.findall(r"font[^;]*?([\d.]+)px", svg)
    # Font sizes are in the units of the view box, of which 72 are as long as 100 pixels.
    assert min(float(size) for size in sizes) * 100 / 72 >= 11


def test_every_figure_has_a_title_of_its_own() -> None:
    titles = tomllib.loads((STUDIES / TITLES).read_text())
    assert sorted(titles) == FIGURES
    assert len(set(titles.values())) == len(titles)
    assert sorted(file.name.removesuffix(".svg") for file in STUDIES.glob("*.svg")) == FIGURES


def write_names_alone(figure: Figure, path: Path) -> None:
    """Write an empty figure, because drawing one takes a second (replaces ``save_figure``)."""
    path.with_suffix(".svg").touch()


@pytest.mark.parametrize("pictures", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("study", NAMES)
def test_documented_reports_match_their_measurements(
    study: str, pictures: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not pictures:
        monkeypatch.setattr("benchmarks.reporting.panels.save_figure", write_names_alone)
    for given in (*STUDIES.glob(f"{study}*.csv"), *STUDIES.glob(f"{study}*.json")):
        (tmp_path / given.name).write_bytes(given.read_bytes())
    (tmp_path / TITLES).write_bytes((STUDIES / TITLES).read_bytes())
    # An overview reads the measurements of other studies.
    for one in json.loads((STUDIES / f"{study}.json").read_text()).get("studies", []):
        named = [f"{one['name']}.csv", f"{one['name']}.json"]
        if "dense_mean" in one:
            named.append(f"{one['dense_mean']}.json")
        for name in named:
            (tmp_path / name).write_bytes((STUDIES / name).read_bytes())
    written = write_again(tmp_path / study)
    drawn = sorted(file.name.removesuffix(".svg") for file in tmp_path.glob("*.svg"))
    assert drawn == [figure for figure in FIGURES if study_of(figure) == study]
    compared = ("*.md", "*.svg") if pictures and DRAWN_BY_THIS else ("*.md",)
    for made in (file for pattern in compared for file in tmp_path.glob(pattern)):
        assert made.read_bytes() == (STUDIES / made.name).read_bytes(), made.name
    assert written or not drawn


def test_unknown_studies_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is of no known study"):
        write_again(tmp_path / "unknown")


def test_figures_of_others_have_neutral_titles(tmp_path: Path) -> None:
    """A title that says what is seen is true for the measurements beside it only."""
    assert title_of(tmp_path / "table-1", "A study") == "A study"
    (tmp_path / TITLES).write_text('"table-1.5" = "What is seen"\n')
    assert picture(tmp_path / "table-1.5", "A study") == "![What is seen](./table-1.5.svg)"


def test_rows_of_a_line_of_panels_are_the_same(tmp_path: Path) -> None:
    """The second panel lacks the first row; its point stays in the row of its name."""
    panels = [
        Panel("one", "loss", [Series("", OTHER, {"a": [1.0], "b": [2.0, 3.0]})]),
        Panel("two", "loss", [Series("", OTHER, {"b": [2.0]})], [Reference("line", 1.0)]),
    ]
    draw(StudyFigure(panels, 2, rows=True), tmp_path / "drawn", "A title")
    svg = (tmp_path / "drawn.svg").read_text()
    assert re.findall(r">(a|b|line|A title)</text>", svg) == ["a", "b", "A title", "line"]


def test_values_beyond_the_axis_are_written(tmp_path: Path) -> None:
    series = Series("", OTHER, {"a": [1.0], "b": [2.0], "c": [4000.0]})
    draw(StudyFigure([Panel("", "loss", [series], end=3.0)], 1, rows=True), tmp_path / "x", "T")
    assert ">4,000 →</text>" in (tmp_path / "x.svg").read_text()


def test_arms_look_like_their_methods() -> None:
    assert look_of_arm("FLAP, tuned") == METHODS["flap"]
    assert look_of_arm("FedPETuning, then Mask Tuning") == METHODS["fedpetuning"]
    assert look_of_arm("rank 8, svd") == METHODS["fedpetuning"].variant(1)
    assert look_of_arm("unknown") == OTHER
