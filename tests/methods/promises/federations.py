"""Federations of one method, and what its promises read of their runs."""

from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message

from espalier.messages.message import Header
from espalier.messages.records import read
from tests.bench import EVALUATED, Bench, Home, home


def third_order_of(server_round: int) -> Callable[[Header], bool]:
    """Match the third client's training request of a round; for ``Bench.killed``."""
    return lambda header: (
        (header.kind, header.server_round, header.client)
        == (
            "train",
            server_round,
            2,
        )
    )


ALL_FIGURES = EVALUATED | {"evaluation.max-samples": 0}


def silent_after_enrolment(request: Message, reply: Message) -> Message | None:
    """Drop every reply after enrolment (a tamper of ``InProcessGrid``)."""
    return reply if read(request.content).header.kind == "enrol" else None


@dataclass(frozen=True, repr=False)
class Uninterrupted:
    """Run that several tests read and none changes."""

    bench: Bench
    folder: Path
    requests: list[Message]
    received: list[tuple[int, Message]]
    """Pairs (partition, reply)."""
    printed: str


class Federations:
    """Federations of one method, and runs that several tests read."""

    method: str
    settings: dict[str, Any]
    last_round: int
    """Round after which the killed run is killed; work must be left to do."""
    result_round: int = 0
    """First round in which a ``push`` carries the result.

    A ``push`` of an earlier round carries what the next round needs.
    """

    planned_exactly = False
    """True if these runs have the largest number of bytes of the plan."""

    cuts_samples: str
    """Name of the function that cuts the text of the method's clients."""

    @pytest.fixture(scope="class")
    @classmethod
    def home(cls, tmp_path_factory: pytest.TempPathFactory) -> Home:
        """Create the model and the evaluation text of all runs of the class."""
        return home(tmp_path_factory.mktemp("home"))

    @pytest.fixture
    def bench(self, tmp_path: Path, home: Home, monkeypatch: pytest.MonkeyPatch) -> Bench:
        monkeypatch.setenv("ESPALIER_STATE_DIR", str(tmp_path / "state"))
        # The minimum for real sites is larger than the texts of the bench.
        monkeypatch.setattr("espalier.data.client_text.MIN_PREDICTIONS", 15)
        return Bench(tmp_path, self.method, self.settings, home=home)

    @pytest.fixture
    def evaluated(self, bench: Bench) -> Bench:
        """Return a bench that makes all comparisons, on the whole evaluation text."""
        return replace(bench, settings=bench.settings | ALL_FIGURES)

    @pytest.fixture
    def on_own_text(self, bench: Bench) -> Bench:
        """Return a bench that evaluates on the clients' own text and makes no other comparison."""
        return replace(bench, settings=bench.settings | {"evaluation.own-text": True})

    @pytest.fixture(scope="class")
    @classmethod
    def plain(cls, home: Home, tmp_path_factory: pytest.TempPathFactory) -> "Uninterrupted":
        """Execute one undisturbed run."""
        return cls._uninterrupted(tmp_path_factory.mktemp("plain"), home, {})

    @pytest.fixture(scope="class")
    @classmethod
    def whole(cls, home: Home, tmp_path_factory: pytest.TempPathFactory) -> "Uninterrupted":
        """Execute one undisturbed run with all metrics."""
        return cls._uninterrupted(tmp_path_factory.mktemp("whole"), home, ALL_FIGURES)

    @pytest.fixture(scope="class")
    @classmethod
    def without_client_2(
        cls, home: Home, tmp_path_factory: pytest.TempPathFactory
    ) -> "Uninterrupted":
        """Execute a run whose third client is silent after enrolment."""
        return cls._uninterrupted(tmp_path_factory.mktemp("without"), home, {}, silent=2)

    @classmethod
    def _uninterrupted(
        cls, folder: Path, home: Home, changes: dict[str, Any], silent: int | None = None
    ) -> "Uninterrupted":
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setenv("ESPALIER_STATE_DIR", str(folder / "state"))
            monkeypatch.setattr("espalier.data.client_text.MIN_PREDICTIONS", 15)
            bench = Bench(folder, cls.method, cls.settings | changes, home=home)
            requests = list[Message]()
            grid = bench.grid()
            grid.before_push = requests.append
            if silent is not None:
                grid.tamper[silent] = silent_after_enrolment
            with redirect_stdout(StringIO()) as printed:
                folder = bench.run(grid)
            return Uninterrupted(bench, folder, requests, grid.received, printed.getvalue())

    def model_of_clients(self, run: Uninterrupted) -> Path:
        """Return the directory of the model that clients work on."""
        return run.bench.model
