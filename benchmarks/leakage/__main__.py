"""Measure what replies tell about a client's text.

    python -m benchmarks.leakage --model DIRECTORY --text FILE
    python -m benchmarks.leakage --kind "pooled pruning, sums" --seeds 0 1 2

For each kind of reply an attacker, who knows the model, the settings and all candidate texts, tells
samples that a client used from samples that nobody used, and the used one of two data sets. It sees
each reply, or only the mean of several replies, as with secure sums. For pooled pruning noise of
several epsilons is emulated; adapters are also trained by DP-SGD with several epsilons, if opacus
is installed. In adapters it also looks for canaries. Without ``--text`` the text is
the source code of Python's standard library.

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
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks.leakage.adapters import (
    POSSIBILITIES,
    AdapterAttack,
    canaries,
    exposures,
    insert,
    private_tuning,
)
from benchmarks.leakage.data_sets import DataSets
from benchmarks.leakage.figures import Figures
from benchmarks.leakage.report import FIGURES, KEYS, NO_NOISE, write_report
from benchmarks.leakage.statistics import DP_SGD, EPSILONS, KINDS, POOLED, StatisticsAttack
from benchmarks.membership.clients import Clients
from benchmarks.reporting.rows import Rows
from benchmarks.study_command import add_arguments, exit_status, model_conditions, new_parser
from espalier.errors import InputError
from espalier.hf.machine.computing import Computing
from espalier.hf.opening.opened_model import open_model

ADAPTERS = "FedPETuning, adapters of one round"
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
        choices=[ADAPTERS, *KINDS],
        help="kind of reply; may be given several times; default: all",
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
        together = self.given.together
        attack = (
            AdapterAttack(self.sets, self.computing)
            if kind == ADAPTERS
            else StatisticsAttack(self.sets, KINDS[kind], self.computing)
        )
        for seen, found in (
            (EACH, attack.alone()),
            (_sum_of(together), attack.summed(together)),
        ):
            yield self.key(kind, seen), _figures(found)
        if isinstance(attack, StatisticsAttack) and kind == POOLED:
            for number, epsilon in ((n, e) for n in (1, together) for e in EPSILONS):
                found = attack.private(number, epsilon, self.seed)
                seen = EACH if number == 1 else _sum_of(number)
                noise = f"{epsilon:g}" if epsilon < float("inf") else "infinity, clipped"
                yield self.key(kind, seen, noise), _figures(found)
        for epsilon in DP_SGD if kind == ADAPTERS and find_spec("opacus") else ():
            yield from self._private_rows(epsilon)

    def _private_rows(self, epsilon: float) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Yield the rows of adapters that were trained by DP-SGD."""
        attack = AdapterAttack(self.sets, self.computing, private_tuning(epsilon))
        together = self.given.together
        yield self.key(ADAPTERS, EACH, f"{epsilon:g}"), _figures(attack.alone())
        summed = attack.summed(together)
        yield self.key(ADAPTERS, _sum_of(together), f"{epsilon:g}"), _figures(summed)

    def canary_rows(self, times: int) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Yield the rows of canaries that are in each client's text a number of times."""
        given = self.given
        clients = self._clients(self.folder / f"canaries-{times}", given.together)
        clients.deal()
        sentences = canaries(given.together + POSSIBILITIES - 1, self.seed)
        inserted = sentences[: given.together]
        for client, canary in enumerate(inserted):
            insert(clients.folder, client, canary, times)
        alone, summed = exposures(
            clients,
            given.together,
            given.together,
            inserted,
            sentences[given.together :],
            self.computing,
        )
        for seen, found in ((EACH, alone), (_sum_of(given.together), summed)):
            figures = dict.fromkeys(FIGURES, None) | {"exposure": fmean(found)}
            yield self.key(_canary(times), seen), figures

    def key(self, message: str, seen: str, epsilon: str = NO_NOISE) -> dict[str, Any]:
        """Return the keys of a row."""
        return {"seed": self.seed, "message": message, "seen": seen, "epsilon": epsilon}


EACH = "each reply"


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
            for kind in given.kind or [*KINDS, ADAPTERS]:
                # The last row of a kind is written last.
                last = measurement.key(kind, _sum_of(given.together))
                if rows.missing(iter([last])) or _lacks_noise(rows, measurement, kind):
                    rows.add_all(measurement.rows(kind))
            for times in CANARY_TIMES if not given.kind or ADAPTERS in given.kind else ():
                last = measurement.key(_canary(times), _sum_of(given.together))
                if rows.missing(iter([last])):
                    rows.add_all(measurement.canary_rows(times))
    write_report(rows.rows, conditions, path)
    print(f"written      {path}.md")


def _lacks_noise(rows: Rows, measurement: Measurement, kind: str) -> bool:
    """Return whether rows with noise are missing."""
    last = {POOLED: "infinity, clipped"}
    if find_spec("opacus"):
        last[ADAPTERS] = f"{DP_SGD[-1]:g}"
    if kind not in last:
        return False
    together = _sum_of(measurement.given.together)
    return bool(rows.missing(iter([measurement.key(kind, together, last[kind])])))


def main() -> int:
    """Do the missing attacks and write the page; return 2 after an error."""
    given = _arguments()
    return exit_status(lambda: _work(given))


if __name__ == "__main__":
    sys.exit(main())
