"""Protection of a site's own data: what may be read, and what errors may reveal.

Covers: outside a simulation only data that the site's own configuration names is read, in the
format that it names, and Python's own texts, which every installation has. The site's log has the
full text of errors about the data. Errors that leave the site omit numbers of lines, bytes, samples
and records, and the path. An answer must be based on a minimum number of tokens and, if the owner
wants it, of groups.
Does not cover: a failure reveals that the data cannot be used at all. A run that asks for much data
learns roughly how much there is.
"""

from collections.abc import Callable, Collection, Iterable
from functools import wraps
from typing import ParamSpec, TypeVar

from espalier.amounts import count
from espalier.errors import EspalierError, InputError
from espalier.settings.node import NodeSettings
from espalier.settings.tables.data import DataSettings
from espalier.settings.tables.evaluation import BUILT_IN_TEXTS
from espalier.settings.tables.task import TEXT

P = ParamSpec("P")
R = TypeVar("R")

OUTWARD = "data-path: this site's data cannot be used for this run; the node's log gives the reason"


def redacted_errors(read: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that reads a site's data, so that its errors do not leave the site.

    The server receives the error's outward message, or ``OUTWARD`` if it came without one.
    """

    @wraps(read)
    def reading(*args: P.args, **named: P.kwargs) -> R:
        try:
            return read(*args, **named)
        except EspalierError as error:
            error.restrict(OUTWARD)
            raise

    return reading


def no_data() -> EspalierError:
    """Return the error for a site without data.

    In a deployment the run's ``[data]`` can name no file, because sites have their own.
    """
    text = (
        "data-path: neither this site nor the run's data.path names a file; set data-path in"
        " --node-config"
    )
    return InputError(text, text)


def not_allowed() -> EspalierError:
    """Return the error for a site that does not permit evaluation on its own data."""
    text = (
        "evaluation.own-text: this site does not allow it; its owner can allow it with"
        " own-text=true in --node-config"
    )
    return InputError(text, text)


def require_own_data(node: NodeSettings, data: DataSettings, task: str = TEXT) -> None:
    """Refuse to read data that the site's own configuration does not name.

    A simulated client is not restricted. Raises InputError if the run names the data, or it needs
    records of a task that the site's file does not have.
    """
    if node.simulated:
        return
    if node.data_path and (node.data_task or TEXT) != task:
        has = f"records of the task {node.data_task}" if node.data_task else "text"
        wants = f"records of the task {task}" if task != TEXT else "text"
        _refuse(
            f"data-task: this site's data-path contains {has}, but the run needs {wants}; if the"
            " file contains them, its owner sets data-task in --node-config"
        )
    if not node.data_path and (task != TEXT or data.origin not in BUILT_IN_TEXTS):
        _refuse(
            "data-path: this site names no file, and does not open files that a run names"
            f" (data.source = '{data.origin}'); set data-path in --node-config"
        )


def require_tokens(node: NodeSettings, tokens: int, remedy: str) -> None:
    """Refuse an answer that is based on fewer tokens than the site requires.

    The error does not contain the number of tokens that were found. Raises InputError if there are
    fewer tokens than ``min-tokens``.
    """
    if tokens < (least := node.fewest_tokens()):
        _refuse(
            f"min-tokens = {least}: the answer would be computed from fewer tokens; {remedy},"
            " or lower min-tokens in --node-config"
        )


def require_groups(node: NodeSettings, groups: Iterable[Collection[int]], remedy: str) -> None:
    """Refuse an answer that is based on fewer groups than the site requires.

    Parameters
    ----------
    groups : numbers of the groups in each passage, sample or item behind the answer

    Raises
    ------
    InputError
        There are fewer groups than ``min-groups``. The text for the server contains no numbers.
    """
    least = node.fewest_groups()
    num_groups = len(set().union(*groups))
    if num_groups < least:
        why = (
            f"would be based on fewer groups (data-group); {remedy}, or its owner lowers min-groups"
        )
        there = "there is" if num_groups == 1 else "there are"
        text = f"min-groups = {least}: {there} {count(num_groups, 'group')}, so an answer {why}"
        raise InputError(text, f"min-groups: an answer {why}")


def _refuse(text: str) -> None:
    raise InputError(text, text)
