"""A site's own data: what of it may be read, how much of it an answer must rest on, and what leaves the site when it is wrong.

Covers: outside of a simulation nothing is read but what the site's own configuration names, in the form that it names, and
Python's own texts, which every installation has; what is wrong with the data is told in full in the site's log, and to others
without its numbers of lines, bytes, windows and records, and without its path.
Does not cover: that something can be done with the data at all or cannot, which a failure tells, and which a run that asks
for much learns about how much there is.
"""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from espalier.settings.mistakes import Mistake
from espalier.settings.node import NodeSettings
from espalier.settings.run import BUILT_IN_TEXTS, DataSettings
from espalier.settings.task import TEXT

P = ParamSpec("P")
R = TypeVar("R")

OUTWARD = "data-path: this site's data cannot be used for this run; the log of its node says why"


def told_at_the_site(read: Callable[P, R]) -> Callable[P, R]:
    """What a function that reads a site's data says is wrong leaves the site only as far as its mistakes say."""

    @wraps(read)
    def reading(*args: P.args, **named: P.kwargs) -> R:
        try:
            return read(*args, **named)
        except Mistake as mistake:
            if mistake.told is None:
                mistake.told = OUTWARD
            raise

    return reading


def no_data() -> Mistake:
    """The error of a site that has no data: in a deployment the run's ``[data]`` may name none, since sites have their own."""
    text = (
        "data-path: this site names no file of its own, and the run's data.path names none either;"
        " give the site one, with data-path in --node-config"
    )
    return Mistake(text, text)


def not_allowed() -> Mistake:
    """The error of a site that is not evaluated on its own data."""
    text = (
        "evaluation.own-text: this site does not allow it; its owner can, with own-text=true in"
        " --node-config"
    )
    return Mistake(text, text)


def require_own_data(node: NodeSettings, data: DataSettings, task: str = TEXT) -> None:
    """Refuse to read what a site's own configuration does not name.

    Raises
    ------
    Mistake
        The run names the data, or it wants records of another task than the site has.
    """
    if node.simulated:
        return
    if node.data_path and (node.data_task or TEXT) != task:
        has = f"records of the task {node.data_task}" if node.data_task else "text"
        wants = f"records of the task {task}" if task != TEXT else "text"
        _refuse(
            f"data-task: this site's data-path holds {has}, the run wants {wants}; if it has them,"
            " its owner says so there"
        )
    if not node.data_path and (task != TEXT or data.source not in BUILT_IN_TEXTS):
        _refuse(
            "data-path: this site names no file of its own, and opens none that a run names"
            f" (data.source = '{data.source}'); give the site one, with data-path in --node-config"
        )


def require_tokens(node: NodeSettings, tokens: int, remedy: str) -> None:
    """Refuse an answer that would rest on fewer tokens than the site allows; how many they are is not told.

    Raises
    ------
    Mistake
        They are fewer than ``least-tokens``.
    """
    if tokens < (least := node.fewest_tokens()):
        _refuse(
            f"least-tokens = {least}: an answer would rest on fewer; {remedy}, or lower"
            " least-tokens in --node-config"
        )


def _refuse(text: str) -> None:
    raise Mistake(text, text)
