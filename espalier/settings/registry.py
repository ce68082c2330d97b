"""Registry of methods: each module of ``espalier.methods.pruning`` and ``.tuning`` is one method.

Its ``METHOD`` names the parts of the method. Those in other rooms are written as ``module`` or
``module:name`` and imported on first use. So a process that only transfers bytes does not load
torch, and a site does not load the server's packages.
"""

from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from espalier.settings.shared_keys import shared_keys

if TYPE_CHECKING:
    from espalier.settings.method import MethodSettings

TUNING_TABLES = ("lora", "task", "training")


@dataclass(frozen=True)
class Row:
    """Parts of one method."""

    title: str
    """Name and, in brackets, a short description for users."""
    settings: "type[MethodSettings]"
    """Settings table of the method.

    Its module also has the contracts, unless ``contracts`` names another one.
    """
    strategy: str
    """Strategy of the method, a ``strategies.base.method.Method`` class."""
    job: str
    """Module of the client's job.

    It has ``train`` and ``evaluate``, and ``local_baseline`` if clients compute one or a model
    of their own in a message of its own.
    """
    contracts: str = ""
    """Module of the contracts; empty if it is that of ``settings``.

    It has ``contract`` (for train and fetch), ``push_contract`` and, optionally, ``EXAMPLES``.
    """
    push: str = "client_app.protocol.push:store_part"
    """Function of site and request that handles a ``push`` message at a client.

    It works without torch if it only transfers bytes.
    """
    outcome: str = "server_app.artifacts.pruned_model:EditedOutcome"
    """Output of a run, a ``server_app.artifacts.outcome.Outcome`` class.

    It defines which files are written, what is measured and what is compared.
    """
    baseline: str = ""
    """Function that makes the centralized baseline for the outcome; empty without a baseline."""
    dry_run: str = "server_app.estimate.messages.pruning:DryEditing"
    """Assumptions with which the strategy runs without clients, a ``DryRun`` class.

    The default suits strategies that are ``Editing``.
    """
    work: str = "server_app.estimate.work.pruning:BlockWalk"
    """Memory and computation for an estimate, a ``server_app.estimate.work.work.Work`` class."""
    tunes: bool = False
    """True if clients train; the method then reads ``[lora]``, ``[training]`` and ``[task]``.

    Clients of other methods read calibration samples.
    """
    measured_by_round: bool = False
    """True if results of single rounds can be measured (``evaluation.every``).

    The outcome then has ``intermediate_metrics``.
    """
    summands: Callable[..., Any] | None = None
    """Function of round, plan and settings that returns the specs of a reply's summands.

    Its result is a ``SumSpecs`` of ``espalier.messages.sums.summands``. None if clients' tensors
    cannot be summed secretly (``federation.secure-sum``).
    """
    to_summands: str = ""
    """Function that turns a client's plain reply into the summands of one blob.

    It is a ``client_app.summands.plain_blob.ToSummands``.
    """
    summands_reason: str = ""
    """Reason why there are no ``summands``, as the end of a sentence about the method."""

    @property
    def contracts_module(self) -> str:
        """Module of the contracts."""
        return self.contracts or self.settings.__module__

    def tables(self, own: str) -> tuple[str, ...]:
        """Return the tables that the method reads besides the general ones, its own first."""
        shared = dict.fromkeys(shared_keys(self.settings).values())
        tuning = TUNING_TABLES if self.tunes else ()
        return (own, "federation", *tuning, *(name for name in shared if name not in tuning))


FAMILIES = ("pruning", "tuning")
"""Packages in ``espalier.methods`` whose modules are methods.

Folders in them have what several methods share.
"""


class Registry(MutableMapping[str, Row]):
    """Rows of all methods by name, in alphabetical order; a row is imported on first use."""

    def __init__(self) -> None:
        self._modules = {
            file.stem.replace("_", "-"): f"espalier.methods.{family}.{file.stem}"
            for family in FAMILIES
            for file in (Path(__file__).parents[1] / "methods" / family).glob("[!_]*.py")
        }
        self._rows = dict[str, Row]()

    def __getitem__(self, name: str) -> Row:
        if name not in self._rows:
            row: Row = import_module(self._modules[name]).METHOD
            self._rows[name] = row
        return self._rows[name]

    def __setitem__(self, name: str, row: Row) -> None:
        self._rows[name] = row

    def __delitem__(self, name: str) -> None:
        del self._rows[name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._modules.keys() | self._rows.keys()))

    def __len__(self) -> int:
        return len(self._modules.keys() | self._rows.keys())

    def __contains__(self, name: object) -> bool:
        return name in self._modules or name in self._rows


METHODS = Registry()


def part(where: str) -> Any:
    """Import what a row names: a module, or an object in it."""
    module, colon, name = where.partition(":")
    found = import_module(module)
    return getattr(found, name) if colon else found


def settings_of(method: str) -> "type[MethodSettings]":
    """Return the class of a method's own settings table."""
    return METHODS[method].settings


def tables_of(method: str) -> tuple[str, ...]:
    """Return the tables that a method reads besides the general ones; none if it is unknown."""
    return METHODS[method].tables(method) if method in METHODS else ()


def all_tables() -> set[str]:
    """Return the tables that only some of the methods read."""
    return {table for method in METHODS for table in tables_of(method)}
