"""Estimate of a run: all numbers together, and their text."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from espalier.amounts import count, duration
from espalier.amounts import size as as_size
from espalier.hf.opening.opened import OpenedModel
from espalier.messages.message import Kind
from espalier.settings.methods import METHODS, part
from espalier.settings.run import RunSettings
from server_app.estimate.disk import Disk, disk_of
from server_app.estimate.dry_runs.dry_run import CASES
from server_app.estimate.dry_runs.tuning import DryTuning
from server_app.estimate.exchange import Traffic
from server_app.estimate.memory import Memory, superlink, supernode
from server_app.estimate.traffic import TERA, RunTraffic, Speeds, asked_of, seconds
from server_app.estimate.work.base import Work
from server_app.public_tests import PublicTests


@dataclass(frozen=True)
class Plan:
    """Estimate of the resources of a run.

    Parameters
    ----------
    tests : evaluation texts and items, if they were read
    """

    settings: RunSettings
    model: OpenedModel
    tests: PublicTests | None = None
    simulation: bool = True

    @cached_property
    def traffic(self) -> RunTraffic:
        """Messages of the run."""
        asked = asked_of(self.settings, self.tests, self.model.family.kind == "encoder")
        return RunTraffic(self.settings, self.model, asked)

    @cached_property
    def work(self) -> Work:
        """Memory and operations of the processes."""
        kind: type[Work] = part(METHODS[self.settings.method].work)
        return kind(self.traffic)

    @cached_property
    def client(self) -> Memory:
        """Memory of a client's process."""
        return self.work.client()

    @cached_property
    def server(self) -> Memory:
        """Memory of the ServerApp's process."""
        return self.work.server(self.simulation)

    @cached_property
    def disk(self) -> Disk:
        """Space on all disks."""
        return disk_of(self.work, simulation=self.simulation)

    def seconds_of_round(self, client: int, speeds: Speeds) -> float:
        """Return the seconds of a client's round, with the traffic of its busiest round."""
        by_round: dict[int, int] = {}
        for one in self.traffic.exchanges(client):
            by_round[one.server_round] = by_round.get(one.server_round, 0) + one.num_bytes
        return seconds(self.work.operations(), max(by_round.values(), default=0), speeds)

    # ----- as text -----

    def short(self, speeds: Speeds) -> list[str]:
        """Return a few lines, printed before a run starts.

        The messages of a simulation use no network, so they take no time.
        """
        traffic = self.traffic
        least, usual, most = map(traffic.total, CASES)
        clients = range(self.settings.num_clients)
        per_client = max(traffic.of_client(client).num_bytes for client in clients)
        total = f"{as_size(usual.num_bytes)} in all"
        if traffic.open_questions:
            total += f" ({as_size(least.num_bytes)} to {as_size(most.num_bytes)})"
        client = as_size(sum(self.disk.client.values()))
        server = as_size(sum(self.disk.server.values()))
        memory = (
            f"about {as_size(self.client.peak)} per client and {as_size(self.server.peak)} of the"
            " server"
        )
        largest = most.largest
        link = as_size(superlink(most, self.settings.num_clients).peak)
        flower = f"{link} of the SuperLink and {as_size(supernode(largest).peak)} of a SuperNode"
        lines = [
            f"planned      messages: {as_size(per_client)} per client, {total}",
            f"planned      memory: {memory}; disk: {client} per client and {server} of the server",
        ]
        if not self.simulation:
            superlinks = f"disk of the SuperLink {as_size(self.disk.superlink)}"
            lines.append(f"planned      memory of Flower's processes: {flower}; {superlinks}")
        return [*lines, f"planned      time: {self._short_time(speeds)}"]

    def _short_time(self, speeds: Speeds) -> str:
        speed = f"{speeds.teraflops:.3g} teraflops"
        if speeds.measured:
            computed = duration(self.work.operations() / (speeds.teraflops * TERA), tenths=True)
            return (
                f"a client's round {computed} of computing at {speed}, as measured on this machine"
            )
        found = duration(self.seconds_of_round(0, speeds), tenths=True)
        line = f"{speeds.megabits:g} megabits per second"
        return f"a client's round {found} at {speed} and {line} (espalier plan takes other speeds)"

    def long(self, speeds: Speeds) -> list[str]:
        """Return all lines."""
        return [
            *self._head(),
            "",
            *self._bytes(),
            "",
            *self._memory(),
            "",
            *self._disk(),
            "",
            *self._time(speeds),
        ]

    def _head(self) -> list[str]:
        plan = self.model.plan
        blocks = count(len(plan.blocks), "block")
        clients = count(self.settings.num_clients, "client")
        lines = [
            f"{self.settings.method}: {METHODS[self.settings.method].title}",
            f"model of {plan.num_parameters:,} parameters in {blocks}; {clients}",
        ]
        strategy = self.traffic.strategy
        if isinstance(strategy, DryTuning):
            trained = strategy.averaged.num_parameters
            lines.append(f"a client trains {trained:,} parameters at most")
        return lines

    def _bytes(self) -> list[str]:
        rows = [("round", "message", "down", "up", "messages"), *self._shortened()]
        lines = ["Bytes of one client (client 0), by round", *_table(rows)]
        for case in CASES if self.traffic.open_questions else CASES[1:2]:
            own = self.traffic.of_client(0, case)
            total = self.traffic.total(case)
            name = "" if not self.traffic.open_questions else f", {case}"
            lines.append(
                f"in all{name}: {as_size(own.down)} down and {as_size(own.up)} up per client,"
                f" {as_size(total.down)} and {as_size(total.up)} at the server in"
                f" {count(total.messages, 'request')}; largest message {as_size(total.largest)}"
            )
        if self.traffic.open_questions:
            lines.append(f"left open: {self.traffic.open_questions}")
        return lines

    def _shortened(self) -> Iterator[tuple[str, ...]]:
        """Yield the rows of client 0, with consecutive rounds of equal messages combined."""
        rounds: dict[int, list[tuple[Kind, Traffic]]] = {}
        for (number, kind), one in self.traffic.by_kind(0).items():
            rounds.setdefault(number, []).append((kind, one))
        for rows, equal in groupby(sorted(rounds), rounds.__getitem__):
            numbers = list(equal)
            last = f" to {numbers[-1]}, each" if len(numbers) > 1 else ""
            for kind, one in rows:
                sizes = (as_size(one.down), as_size(one.up), str(one.messages))
                yield f"{numbers[0]}{last}", kind, *sizes

    def _memory(self) -> list[str]:
        traffic = self.traffic.total("most")
        known: list[tuple[str, Memory]] = [("a client", self.client), ("the server", self.server)]
        known += [
            ("the SuperLink", superlink(traffic, self.settings.num_clients)),
            ("a SuperNode", supernode(traffic.largest)),
        ]
        lines = [
            "Memory, resident at its peak (libraries: measured constants; the rest: from shapes)"
        ]
        for who, memory in known:
            parts = ", ".join(
                f"{name} {as_size(size)}" for name, size in memory.largest.parts.items() if size
            )
            lines.append(
                f"  {who:<14} {as_size(memory.peak):>9}: libraries {as_size(memory.libraries)};"
                f" {memory.largest.name}: {parts}"
            )
        return lines

    def _disk(self) -> list[str]:
        disk = self.disk
        lines = ["Disk, at its fullest"]
        for who, parts in (("a client", disk.client), ("the server", disk.server)):
            told = ", ".join(f"{name} {as_size(size)}" for name, size in parts.items() if size)
            lines.append(f"  {who:<14} {as_size(sum(parts.values())):>9}: {told}")
        lines.append(f"  {'the SuperLink':<14} {as_size(disk.superlink):>9}: messages under way")
        return [*lines, f"  {'a SuperNode':<14} {as_size(0):>9}: messages are in its memory"]

    def _time(self, speeds: Speeds) -> list[str]:
        found = self.seconds_of_round(0, speeds)
        how = "measured on this machine" if speeds.measured else "stated"
        rounds = self.traffic.strategy.num_rounds
        alone = (
            rounds * self.work.operations()
            if any(one.kind == "alone" for one in self.traffic.exchanges(0))
            else 0.0
        )
        everything = self.traffic.of_client(0).num_bytes
        whole = seconds(rounds * self.work.operations() + alone, everything, speeds)
        return [
            (
                "Time, an estimate (operations by speed, bytes by line; without the server's work,"
                " starts and reading)"
            ),
            (
                f"  a client's round: {self.work.operations() / 1e12:.3g} T operations,"
                f" {duration(found, tenths=True)} with {speeds.teraflops:.3g} teraflops ({how}) and"
                f" {speeds.megabits:g} megabits per second"
            ),
            (
                f"  a client in {count(rounds, 'round')}{', and by itself' if alone else ''}:"
                f" {duration(whole, tenths=True)}"
            ),
        ]


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  "
        + "  ".join(
            cell.ljust(width) if place < 2 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
