"""Style of all figures: Okabe-Ito colours, and one colour and one marker per method everywhere.

The colours stay apart for people with colour-blindness, and markers tell methods with similar
colours apart in print. Figures of a report are narrow, so that their text stays readable on a
phone; figures of studies are 900 pixels wide.

Source: M. Okabe and K. Ito, Color Universal Design (2008), https://jfly.uni-koeln.de/color.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLACK = "#000000"
ORANGE = "#E69F00"
SKY = "#56B4E9"
GREEN = "#009E73"
YELLOW = "#F0E442"
BLUE = "#0072B2"
VERMILLION = "#D55E00"
PURPLE = "#CC79A7"
GREY = "#595959"
"""Grey for texts and for models that no method made; readable on white."""
OKABE_ITO = (BLUE, ORANGE, GREEN, VERMILLION, PURPLE, SKY, BLACK, YELLOW)
"""Colours for a series of things without a colour of their own, such as clients."""
SEQUENTIAL = "cividis"
"""Colour map of heat maps, which looks the same with every kind of colour vision."""


Fill = Literal["full", "none", "light"]
"""Filling of a marker: its colour, nothing, or a light tone of its colour."""


class Look(NamedTuple):
    """Colour and marker of one thing in figures, and how variants of it differ."""

    colour: str
    marker: str
    line: str = "-"
    fill: Fill = "full"

    def variant(self, number: int) -> "Look":
        """Return the look of a variant: the same colour, another line and fill; 0 is itself."""
        return self._replace(line=LINES[number], fill=FILLS[number])


LINES = ("-", "--", ":", "-.")
FILLS: tuple[Fill, ...] = ("full", "none", "light", "full")
"""Lines and fills of variants, in their order."""


METHODS = {
    "fedprllm": Look(BLUE, "o"),
    "fedspallm": Look(VERMILLION, "s"),
    "flap": Look(GREEN, "^"),
    "llm-pruner": Look(ORANGE, "D"),
    "llm-streamline": Look(PURPLE, "v"),
    "slicegpt": Look(SKY, "P"),
    "fedpetuning": Look(BLACK, "X"),
    "hetlora": Look(ORANGE, "h"),
    "flora": Look(SKY, "d"),
    "fed-sb": Look(BLUE, "8"),
    "fedsoda": Look(GREEN, "*"),
    "sft-p": Look(PURPLE, "<"),
    "fedspine": Look(VERMILLION, ">"),
    "pooled-pruning": Look(BLACK, "p"),
}
"""Look of each method."""
MODELS = {
    "original": Look(GREEN, "v"),
    "dense": Look(GREY, "o"),
    "local_baseline": Look(ORANGE, "s"),
    "centralized": Look(SKY, "^"),
    "federated": Look(BLUE, "D"),
}
"""Look of the models that a run compares."""
OTHER = Look(GREY, "o")
"""Look of everything else."""

REPORT_WIDTH = 480
STUDY_WIDTH = 900
"""Width of a figure in pixels."""
DPI = 100
SETTINGS: dict[str, Any] = {
    "font.family": "sans-serif",
    "font.size": 10,
    # A dollar sign in a name does not begin a formula.
    "text.parse_math": False,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#d9d9d9",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 6,
    # Text stays text: it can be selected, searched and read aloud.
    "svg.fonttype": "none",
    # Without this salt the same figure has other ids each time.
    "svg.hashsalt": "espalier",
}


def look_of(method: str) -> Look:
    """Return colour and marker of a method; those of ``OTHER`` for an unknown one."""
    return METHODS.get(method, OTHER)


def series_look(index: int) -> Look:
    """Return colour and marker of a thing of a series, such as a client, by its number."""
    markers = "os^DvP*X<>h"
    return Look(OKABE_ITO[index % (len(OKABE_ITO) - 1)], markers[index % len(markers)])


@contextmanager
def new_figure(height: float, width: float = REPORT_WIDTH) -> Iterator["Figure"]:
    """Make a figure in the common style; draw and save it within the block.

    Parameters
    ----------
    height, width : size in pixels
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context(SETTINGS):
        figure = Figure(figsize=(width / DPI, height / DPI), dpi=DPI, layout="constrained")
        FigureCanvasAgg(figure)
        yield figure


def figure_bytes(figure: "Figure", form: str) -> bytes:
    """Return a figure as a ``png`` or ``svg`` file of its size in pixels; equal figures are equal.

    The metadata of the file lacks date and versions of programs.
    """
    file = BytesIO()
    metadata = {"Date": None, "Creator": None} if form == "svg" else {"Software": None}
    figure.savefig(file, format=form, metadata=metadata)
    if form != "svg":
        return file.getvalue()
    # Matplotlib writes the size in points; a page shall show as many pixels as the PNG has.
    width, height = (round(side * DPI) for side in figure.get_size_inches())
    size = f'width="{width}" height="{height}"'.encode()
    return re.sub(rb'width="[\d.]+pt" height="[\d.]+pt"', size, file.getvalue(), count=1)


def save_figure(figure: "Figure", path: Path) -> None:
    """Write ``path`` with the suffixes ``.png`` and ``.svg``."""
    # Both files have one layout, which takes most of the time.
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for form in ("png", "svg"):
        path.with_suffix(f".{form}").write_bytes(figure_bytes(figure, form))


def inline_svg(figure: "Figure", name: str, title: str) -> str:
    """Return a figure as an ``<svg>`` element for an HTML page.

    Parameters
    ----------
    name : letters, digits and hyphens; the prefix of all ids, so that figures of one page do not
        share any
    title : text for people who do not see the figure
    """
    text = figure_bytes(figure, "svg").decode()
    text = text[text.index("<svg") :]
    # HTML needs no metadata, and the page sets the size of the figure.
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    head, rest = text.split(">", 1)
    view = re.search(r'viewBox="[^"]*"', head)
    assert view is not None
    rest = re.sub(r'\bid="', f'id="{name}-', rest)
    rest = re.sub(r'(xlink:href="#|url\(#)', rf"\g<1>{name}-", rest)
    return (
        f'<svg xmlns:xlink="http://www.w3.org/1999/xlink" {view[0]} role="img"'
        f' aria-label="{escape(title)}">{rest}'
    )
