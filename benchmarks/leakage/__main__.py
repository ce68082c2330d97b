"""Measure what replies tell about a client's text.

    python -m benchmarks.leakage --model DIRECTORY --text FILE
    python -m benchmarks.leakage --kind "pooled pruning, sums" --seeds 0 1 2
    python -m benchmarks.leakage --canaries

For each kind of reply an attacker, who knows the model, the settings and all candidate texts, tells
samples that a client used from samples that nobody used, and the used one of two data sets. It sees
each reply, or only the mean of several replies, as with secure sums. If opacus is installed,
private sums of pooled pruning are attacked with several epsilons, and adapters are also trained by
DP-SGD. In adapters it also looks for canaries. Without ``--text`` the text is the source code of
Python's standard library.

Results go to ``docs/studies/leakage-<model>.csv`` row by row, so an interrupted measurement
continues, and finally to a page next to it.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from functools import cached_property
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks.leakage.canaries import POSSIBILITIES, canaries, exposures, insert
from benchmarks.leakage.data_sets import DataSets
from benchmarks.leakage.figures import Figures
from benchmarks.leakage.private_sums import PrivateSumsAttack
from benchmarks.leakage.report import FIGURES, KEYS, NO_NOISE, write_report
from benchmarks.leakage.statistics import StatisticsAttack
from benchmarks.leakage.statistics_kinds import KINDS
from benchmarks.leakage.trained import TRAINED, TrainedAttack, private_tuning
from benchmarks.leakage.trained_replies import Adapters
from benchmarks.membership.clients import Clients
from benchmarks.reporting.rows import Rows
from benchmarks.study_command import add_arguments, exit_status, model_conditions, new_parser
from espalier.errors import InputError
from espalier.hf.machine.computing import Computing
from espalier.hf.opening.opened_model import open_model

ADAPTERS = "FedPETuning, adapters of one round"
PRIVATE_SUMS = "pooled pruning, private sums"
KINDS_OF_REPLIES = (*KINDS, PRIVATE_SUMS, *TRAINED)
EPSILONS = (1.0, 2.0, 4.0, 8.0)
CANARY_TIMES = (1, 4, 16)
"""How often a canary is in a client's text."""


def _arguments() -> argparse.Namespace:
    parser = new_parser("benchmarks.leakage", __doc__)
    add_arguments(parser, "seeds threads out")
    parser.add_argument("--model", default="demo", help="directory of a Hugging Face model")
    parser.add_argument("--text", type=Path, help="text that is dealt out")
    parser.add_argument(
        "--kind",
        action="append",
        choices=KINDS_OF_REPLIES,
        help="kind of reply; may be given several times; default: all, and canaries",
    )
    parser.add_argument(
        "--canaries", action="store_true", help="canaries only, or with the given kinds"
    )
    parser.add_argument("--clients", type=int, default=16, help="clients that reply")
    parser.add_argument("--unused", type=int, default=16, help="data sets that nobody uses")
    parser.add_argument("--reference", type=int, default=12, help="the attacker's own data sets")
    parser.add_argument("--together", type=int, default=8, help="replies in a sum")
    parser.add_argument("--samples", type=int, default=32, help="of a data set")
    parser.add_argument("--tokens", type=int, default=64, help="of a sample")
    return parser.parse_args()


class Measurement:
    """Attacks with one seed, which decides how the text is dealt out."""

    def __init__(self, given: argparse.Namespace, seed: int, folder: Path) -> None:
        self.given = given
        self.seed = seed
        self.folder = folder
        self.computing = Computing(torch.device("cpu"), torch.float32, given.threads)

    @cached_property
    def sets(self) -> DataSets:
        """Data sets, whose text is dealt out on first use."""
        given = self.given
        number = given.clients + given.unused + given.reference
        clients = self._clients(self.folder / "texts", number)
        clients.deal()
        return DataSets(clients, given.clients, given.unused, given.reference)

    def _clients(self, folder: Path, number: int) -> Clients:
        given = self.given
        return Clients(
            given.model, "code", folder, number, given.samples, given.tokens, self.seed, given.text
        )

    def rows(self, kind: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Yield the rows of a kind of reply: keys and figures."""
        if kind == PRIVATE_SUMS:
            yield from self._private_sums()
            return
        yield from self._both(
            kind,
            TrainedAttack(self.sets, TRAINED[kind](self.sets.clients, self.computing))
            if kind in TRAINED
            else StatisticsAttack(self.sets, KINDS[kind], self.computing),
        )
        # Adapters with DP-SGD follow, each epsilon with trainings of its own.
        for epsilon in epsilons() if kind == ADAPTERS else ():
            adapters = Adapters(self.sets.clients, self.computing, private_tuning(epsilon))
            yield from self._both(kind, TrainedAttack(self.sets, adapters), f"{epsilon:g}")

    def _both(
        self, kind: str, attack: StatisticsAttack | TrainedAttack, epsilon: str = NO_NOISE
    ) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Yield the rows of an attack on each reply, and on means of several."""
        together = self.given.together
        yield self.key(kind, EACH, epsilon), _figures(attack.alone())
        yield self.key(kind, _sum_of(together), epsilon), _figures(attack.summed(together))

    def _private_sums(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Yield rows of sums over normalised records, without noise and with that of the app."""
        attack = PrivateSumsAttack(self.sets, self.computing)
        yield from self._both(PRIVATE_SUMS, attack.exact, "infinity")
        for epsilon in epsilons():
            for number, seen in self._seen():
                found = attack.noisy(number, epsilon, self.seed)
                yield self.key(PRIVATE_SUMS, seen, f"{epsilon:g}"), _figures(found)

    def _seen(self) -> tuple[tuple[int, str], ...]:
        """Return numbers of replies that are seen as one, and their names."""
        return (1, EACH), (self.given.together, _sum_of(self.given.together))

    def canary_rows(
        self, times: int, epsilon: float | None = None
    ) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Yield the rows of canaries that are in each client's text a number of times.

        With an epsilon clients train by DP-SGD. A canary is in one record, so it is protected.
        """
        together = self.given.together
        name = _epsilon(epsilon)
        clients = self._clients(self.folder / f"canaries-{times}-{name}", together)
        clients.deal()
        sentences = canaries(together + POSSIBILITIES - 1, self.seed)
        inserted = sentences[:together]
        for client, canary in enumerate(inserted):
            insert(clients.folder, client, canary, times)
        changes = {} if epsilon is None else private_tuning(epsilon)
        kind = Adapters(clients, self.computing, changes)
        found = exposures(kind, together, inserted, sentences[together:])
        for (_, seen), values in zip(self._seen(), found, strict=True):
            figures = dict.fromkeys(FIGURES, None) | {"exposure": fmean(values)}
            yield self.key(_canary(times), seen, name), figures

    def last(self, kind: str) -> dict[str, Any]:
        """Return the keys of the row of a kind that is written last."""
        private = kind in (PRIVATE_SUMS, ADAPTERS)
        epsilon = _epsilon(epsilons()[-1]) if private and epsilons() else NO_NOISE
        if kind == PRIVATE_SUMS and not epsilons():
            epsilon = "infinity"
        return self.key(kind, _sum_of(self.given.together), epsilon)

    def key(self, message: str, seen: str, epsilon: str = NO_NOISE) -> dict[str, Any]:
        """Return the keys of a row."""
        return {"seed": self.seed, "message": message, "seen": seen, "epsilon": epsilon}


EACH = "each reply"


def epsilons() -> tuple[float, ...]:
    """Return the epsilons that are measured; none without opacus, which accounts for them."""
    return EPSILONS if find_spec("opacus") else ()


def _epsilon(epsilon: float | None) -> str:
    return NO_NOISE if epsilon is None else f"{epsilon:g}"


def _sum_of(together: int) -> str:
    return f"sum of {together} replies"


def _canary(times: int) -> str:
    return f"{times} time{'s' if times > 1 else ''} in the text"


def _figures(found: Figures) -> dict[str, Any]:
    return {**asdict(found), "exposure": None}


def _work(given: argparse.Namespace) -> None:
    if given.together < 2 or given.clients % given.together:
        raise InputError(
            f"--together {given.together}: --clients {given.clients} is no multiple of it, or it is"
            " below 2"
        )
    torch.set_num_threads(given.threads)
    model = open_model(given.model)
    conditions = {
        "model": model_conditions(model, "weights"),
        "text": given.text.name if given.text else "Python's standard library",
        **{
            name: getattr(given, name)
            for name in ("clients", "unused", "reference", "together", "samples", "tokens")
        },
    }
    path = given.out / f"leakage-{model.directory.name}"
    rows = Rows(path.with_suffix(".csv"), KEYS, FIGURES, conditions)
    for seed in given.seeds:
        with tempfile.TemporaryDirectory() as folder:
            measurement = Measurement(given, seed, Path(folder))
            for kind in given.kind or ([] if given.canaries else KINDS_OF_REPLIES):
                if rows.missing(iter([measurement.last(kind)])):
                    rows.add_all(measurement.rows(kind))
            if given.kind and not given.canaries:
                continue
            for times, epsilon in product(CANARY_TIMES, (None, *epsilons())):
                last = measurement.key(_canary(times), _sum_of(given.together), _epsilon(epsilon))
                if rows.missing(iter([last])):
                    rows.add_all(measurement.canary_rows(times, epsilon))
    write_report(rows.rows, conditions, path)
    print(f"written      {path}.md")


def main() -> int:
    """Do the missing attacks and write the page; return 2 after an error."""
    given = _arguments()
    return exit_status(lambda: _work(given))


if __name__ == "__main__":
    sys.exit(main())
