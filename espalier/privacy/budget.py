"""Privacy budget of a site: a log of everything that its answers drew, over all runs.

The log is ``<state-dir>/privacy/<site>.jsonl``, a hash chain like the egress log. It outlives runs:
neither ``keep-days`` nor the end of a run removes it. A draw is written before the work on private
data begins, and a second entry when the answer is stored.

Covers: draws of all private runs of a site compose, also over restarts and between runs at the same
time, and if a server chooses runs in view of earlier replies (``run_filter.py``). The same answer,
sent again, draws once. If work failed before its answer was stored, nothing has left the site, so
it is repeated with new noise and without another draw. If the stored answer is lost afterwards, it
is not computed again, since it would have other noise. A log that is missing, damaged, emptied, cut
off at its end or another site's is an error and never an empty budget; a file beside it has the
hash of its last entry.

Draws of answers with shared noise count as if the sum, which has all noise, were the answer. That
rests on the honesty of other sites.

Does not cover: an owner who deletes both files, puts back an older copy of both, or names another
``state-dir``. Two nodes with the same data under different names or on two machines.
Answers of runs that are not private: with ``max-epsilon`` the site refuses those runs, without it
they are not counted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any

from espalier.errors import InputError
from espalier.privacy.accounting import Draw, epsilon_of
from espalier.privacy.guarantee import Guarantee
from espalier.privacy.run_filter import filtered_epsilon
from espalier.storage.atomic import write_bytes
from espalier.storage.client_state import private_folder
from espalier.storage.directory_lock import in_turn
from espalier.storage.hash_chain import Checked, HashChain, chain_check

FOLDER = "privacy"
ORIGIN = "budget"
"""Name that the log has in place of a run."""
DRAW = "draw"
ANSWERED = "answered"
"""Kinds of entries."""


@dataclass(frozen=True)
class Spent:
    """Draws of a site's answers so far."""

    draws: dict[tuple[str, int], Draw]
    """Draws by run and round, in the order in which they were made."""
    answered: frozenset[tuple[str, int]]
    """Runs and rounds whose answers are stored."""
    first_plan: list[Draw]
    """All draws that the first run planned."""

    def by_run(self) -> dict[str, list[Draw]]:
        """Return the draws of each run."""
        runs: dict[str, list[Draw]] = {}
        for (run, _), draw in self.draws.items():
            runs.setdefault(run, []).append(draw)
        return runs


@dataclass(frozen=True)
class Budget:
    """Privacy budget of a site."""

    root: Path
    """State directory of the site."""
    site: str
    max_epsilon: float
    """Maximum epsilon of all answers; 0: no maximum."""
    delta: float

    @property
    def _folder(self) -> Path:
        return private_folder(self.root, FOLDER)

    @property
    def path(self) -> Path:
        """File of the log."""
        return self.root / FOLDER / f"{self.site}.jsonl"

    @property
    def _head(self) -> Path:
        """File with the hash of the last entry, by which a log that was cut off is recognised."""
        return self.path.with_suffix(".head")

    @property
    def _origin(self) -> dict[str, str]:
        return {"lineage": ORIGIN, "site": self.site}

    def spent(self) -> Spent:
        """Read the log.

        Raises InputError if the log is damaged or cannot be read.
        """
        draws: dict[tuple[str, int], Draw] = {}
        answered = set[tuple[str, int]]()
        first_plan: list[Draw] = []
        for entry in self._entries():
            # Two kinds of entries: draws, and answers that are stored.
            key = (str(entry["run"]), int(entry["round"]))
            if entry["entry"] == DRAW:
                draws[key] = Draw(
                    float(entry["noise_multiplier"]),
                    float(entry["sampling_rate"]),
                    int(entry["steps"]),
                )
                # Logs of earlier versions have no plan; one answer fixes an order, too.
                first_plan = first_plan or [draws[key]] * int(entry.get("answers", 1))
            else:
                answered.add(key)
        return Spent(draws, frozenset(answered), first_plan)

    def epsilon(self, spent: Spent, run: str = "", planned: Sequence[Draw] = ()) -> float:
        """Return epsilon of a site's answers at its delta.

        With a run's name its draws are those planned instead of those made so far. Equal draws of
        one run, and those of a site without a maximum, have the smaller of two bounds. Otherwise
        the bound is one that also holds if draws were chosen in view of earlier replies.
        """
        runs = spent.by_run() | ({run: list(planned)} if run else {})
        draws = list(chain.from_iterable(runs.values()))
        # A run without draws tells nothing. Draws under one name that differ are not of one plan.
        chosen_in_turn = sum(map(bool, runs.values())) > 1 or len(set(draws)) > 1
        if not (chosen_in_turn and self.max_epsilon):
            return epsilon_of(draws, self.delta)

        def filtered(of: Sequence[Draw]) -> float:
            return filtered_epsilon(spent.first_plan, of, self.max_epsilon, self.delta)

        # A first run that fits only by the smaller bound is the only one: whether there is a
        # second one must not depend on replies.
        first = filtered(spent.first_plan)
        return filtered(draws) if first <= self.max_epsilon else max(first, filtered(draws))

    def exceeded_by(self, run: str, planned: list[Draw]) -> str:
        """Return why a run with these draws does not fit, in one line; empty if it does.

        Draws of other runs count as they were made, and those of this run as planned.
        """
        if not self.max_epsilon:
            return ""
        spent = self.spent()
        total = self.epsilon(spent, run, planned)
        if total <= self.max_epsilon:
            return ""
        return (
            f"max-epsilon = {self.max_epsilon:g} (delta = {self.delta:g}): earlier runs have spent"
            f" {self.epsilon(spent, run):.3f}, and with this run it would be {total:.3f}"
        )

    def draw(self, run: str, server_round: int, guarantee: Guarantee) -> None:
        """Draw on the budget for an answer of a run, before the work on it begins.

        With shared noise the draw is that of the sum; the entry says on how many sites it rests.

        A repeated request whose answer was not stored draws nothing again. Raises InputError if the
        answer was stored before and is lost, or the draw exceeds the budget.
        """
        key = (run, server_round)
        draw = guarantee.draw
        # One process at a time, so that two runs cannot spend the same budget.
        with in_turn(self._folder):
            spent = self.spent()
            if key in spent.answered:
                raise InputError(
                    f"train: this site answered round {server_round} with noise, and the stored"
                    " answer is gone; another one would reveal more; start a new run"
                )
            # The request is repeated after a failure; it has drawn already.
            if key in spent.draws:
                if spent.draws[key] != draw:
                    raise InputError(
                        f"train: round {server_round} was begun here with other noise, by another"
                        " version of opacus; start a new run"
                    )
                return
            total = self.epsilon(spent, run, [*spent.by_run().get(run, []), draw])
            if self.max_epsilon and total > self.max_epsilon:
                raise InputError(
                    f"max-epsilon = {self.max_epsilon:g} (delta = {self.delta:g}): with this answer"
                    f" the site would have spent {total:.3f}"
                )
            # Written before the work begins; see the module's docstring.
            entry = {"entry": DRAW, "run": run, "round": server_round, **asdict(draw)}
            entry |= {"answers": guarantee.answers}
            share = guarantee.share
            self._append(entry | ({"shared_noise": asdict(share)} if share else {}))

    def note_answered(self, run: str, server_round: int) -> None:
        """Record that an answer is stored, so that it is not computed again; once for each."""
        with in_turn(self._folder):
            if (run, server_round) not in self.spent().answered:
                self._append({"entry": ANSWERED, "run": run, "round": server_round})

    def _append(self, entry: dict[str, Any]) -> None:
        time = datetime.now(UTC).isoformat(timespec="seconds")
        try:
            head = HashChain(self.path, self._origin).append({**entry, "time": time})
            # After the entry: a crash in between leaves a log with one entry more than noted.
            write_bytes(self._head, f"{head}\n".encode(), 0o600)
        except OSError as error:
            raise InputError(
                f"the privacy budget cannot be written ({error.strerror});"
                " check the node's state-dir"
            ) from None

    def _noted_head(self) -> str:
        """Return the noted hash of the last entry; empty if none was noted."""
        try:
            return self._head.read_text(encoding="ascii").strip()
        except FileNotFoundError:
            return ""
        except (OSError, UnicodeDecodeError) as error:
            text = f"{self._head}: cannot be read ({error}); restore it from a backup"
            raise InputError(
                text, "the site's privacy budget cannot be read; its log says more"
            ) from None

    def _fault(self, checked: Checked, noted: str) -> str:
        """Return what is wrong with a log that was verified; empty if nothing is."""
        if checked.fault:
            return checked.fault
        if not checked.entries:
            return "it has no entry; remove it if this site has never answered a private run"
        if checked.origin != self._origin:
            return f"it is that of the site {(checked.origin or {}).get('site')}"
        # A process may end between its first entry and the note of its hash.
        if not noted and checked.entries > 1:
            return f"{self._head.name} beside it is missing or empty"
        if noted and noted not in checked.seen:
            return f"entries at its end are missing: {self._head.name} has the hash of a later one"
        return ""

    def _damaged(self, fault: str) -> InputError:
        text = (
            f"{self.path}: the log of the privacy budget is damaged ({fault}); restore it from a"
            " backup"
        )
        return InputError(text, "the site's privacy budget cannot be read; its log says more")

    def _entries(self) -> list[Mapping[str, Any]]:
        """Return the entries of the log, which is verified as a whole before one is believed."""
        noted = self._noted_head()
        if not self.path.exists():
            if noted:
                raise self._damaged(
                    f"it is missing, and {self._head.name} has the hash of an entry"
                )
            return []
        # What a process left that ended while it wrote is no entry.
        found: list[Mapping[str, Any]] = []
        checked = chain_check(self.path, [noted] if noted else [], found.append)
        if fault := self._fault(checked, noted):
            raise self._damaged(fault)
        return [entry for entry in found if entry.get("entry") in (DRAW, ANSWERED)]
