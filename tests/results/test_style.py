import re
from itertools import combinations
from pathlib import Path

import pytest

from espalier.results.style import METHODS as LOOKS
from espalier.results.style import (
    MODELS,
    OKABE_ITO,
    OTHER,
    STUDY_WIDTH,
    inline_svg,
    look_of,
    new_figure,
    save_figure,
    series_look,
)
from espalier.settings.registry import METHODS


def test_each_method_has_a_look_of_its_own() -> None:
    assert LOOKS.keys() == METHODS.keys()
    for looks in (LOOKS, MODELS):
        assert len(set(looks.values())) == len(looks)
        assert len({look.marker for look in looks.values()}) == len(looks)
    assert {look.colour for look in LOOKS.values()} <= set(OKABE_ITO)
    assert look_of("unknown") == OTHER
    assert len({series_look(index) for index in range(20)}) == 20


def test_variants_keep_colour_and_marker() -> None:
    look = LOOKS["flap"]
    variants = [look.variant(number) for number in range(4)]
    assert variants[0] == look
    assert {variant[:2] for variant in variants} == {look[:2]}
    assert len({variant[2:] for variant in variants}) == 4


def channels(colour: str) -> list[float]:
    """Return the linear red, green and blue of a colour, from 0 to 1."""
    values = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    return [
        value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in values
    ]


@pytest.mark.parametrize(
    "matrix",
    [
        # Viénot, Brettel and Mollon (1999), as in ColorBrewer's and DaltonLens' simulations.
        ((0.11238, 0.88762, 0.0), (0.11238, 0.88762, 0.0), (0.00401, -0.00401, 1.0)),
        ((0.29275, 0.70725, 0.0), (0.29275, 0.70725, 0.0), (-0.02234, 0.02234, 1.0)),
    ],
    ids=["protanopia", "deuteranopia"],
)
def test_models_differ_with_colour_blindness(
    matrix: tuple[tuple[float, float, float], ...],
) -> None:
    seen = {
        name: [
            sum(a * b for a, b in zip(row, channels(look.colour), strict=True)) for row in matrix
        ]
        for name, look in MODELS.items()
    }
    for one, other in combinations(seen.values(), 2):
        assert max(abs(a - b) for a, b in zip(one, other, strict=True)) > 0.1


def test_figures_are_reproducible(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with new_figure(300, STUDY_WIDTH) as figure:
            axes = figure.subplots()
            axes.plot([1, 2], [3, 4], marker="o")
            axes.set_title("a name with $ and $")
            save_figure(figure, tmp_path / name)
    for suffix in (".svg", ".png"):
        assert (tmp_path / f"a{suffix}").read_bytes() == (tmp_path / f"b{suffix}").read_bytes()


def test_inline_figure_has_ids_of_its_own() -> None:
    with new_figure(200) as figure:
        axes = figure.subplots()
        axes.plot([1, 2], [3, 4], marker="o")
        axes.set_title("<b>")
        svg = inline_svg(figure, "one", 'a "quoted" title')
    assert svg.startswith("<svg ")
    assert 'aria-label="a &quot;quoted&quot; title"' in svg
    assert "<b>" not in svg
    ids = re.findall(r'\bid="([^"]*)"', svg)
    assert all(name.startswith("one-") for name in ids)
    assert set(re.findall(r"url\(#([^)]*)\)", svg)) <= set(ids)
    assert set(re.findall(r'href="#([^"]*)"', svg)) <= set(ids)
