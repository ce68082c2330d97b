"""Estimate of a run: all numbers together, and their text.

A client's time is its operations divided by its speed, plus its bytes divided by its bandwidth.
Clients of a deployment work at the same time. Work of the server, process starts, reading and
tokenization are not included.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from espalier.amounts import count, duration
from espalier.amounts import size as as_size
from espalier.hf.opening.opened_model import OpenedModel
from espalier.messages.message import Kind
from espalier.methods.tuning.adapters.tensors import of_all_rounds
from espalier.settings.registry import METHODS, part
from espalier.settings.run import RunSettings
from server_app.estimate.messages.dry_run import Case
from server_app.estimate.messages.traffic import RunTraffic, Traffic, unread_tests
from server_app.estimate.messages.tuning import DryTuning
from server_app.estimate.work.memory import Memory, superlink, supernode
from server_app.estimate.work.work import Work
from server_app.public_tests import PublicTests

TERA = 1e12
MEGA = 1e6
STATED_TERAFLOPS = 0.05
STATED_MEGABITS = 100.0
"""Default speeds without other information: two cores of a laptop, and a home connection."""


@dataclass(frozen=True)
class Speeds:
    """Speed of a client."""

    teraflops: float = STATED_TERAFLOPS
    """Additions and multiplications per second, in 10^12."""
    megabits: float = STATED_MEGABITS
    """Bandwidth in each direction, in 10^6 bits per second."""
    measured: bool = False
    """True if ``teraflops`` were measured on this machine."""

    def seconds(self, operations: float, num_bytes: int = 0) -> float:
        """Return the time for this amount of work and traffic, in seconds."""
        return operations / (self.teraflops * TERA) + 8 * num_bytes / (self.megabits * MEGA)


@dataclass(frozen=True)
class Plan:
    """Estimate of the resources of a run.

    Parameters
    ----------
    tests : evaluation texts and items; None if they were not read
    """

    settings: RunSettings
    model: OpenedModel
    tests: PublicTests | None = None
    simulation: bool = True

    @cached_property
    def traffic(self) -> RunTraffic:
        """Messages of the run."""
        tests = self.tests or unread_tests(self.settings, self.model)
        return RunTraffic(self.settings, self.model, tests)

    @cached_property
    def work(self) -> Work:
        """Memory, disk space and operations of the processes."""
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

    @property
    def superlink(self) -> Memory:
        """Memory of the SuperLink."""
        return superlink(self.traffic.total(), self.settings.num_clients)

    @property
    def supernode(self) -> Memory:
        """Memory of a SuperNode."""
        return supernode(self.traffic.total().largest)

    @cached_property
    def client_disk(self) -> Mapping[str, int]:
        """Bytes on a client's disk, by kind of content."""
        return self.work.client_disk(self.simulation)

    @cached_property
    def server_disk(self) -> Mapping[str, int]:
        """Bytes in the run directory, by kind of content."""
        return self.work.server_disk(self.simulation)

    def seconds_of_round(self, client: int, speeds: Speeds) -> float:
        """Return the seconds of a client's round, with the traffic of its busiest round."""
        by_round = Counter[int]()
        for exchange in self.traffic.exchanges()[client]:
            by_round[exchange.server_round] += exchange.num_bytes
        return speeds.seconds(self.work.operations(), max(by_round.values(), default=0))

    # ----- as text -----

    def short(self, speeds: Speeds) -> str:
        """Return a few lines, printed before a run starts.

        The messages of a simulation use no network, so they take no time.
        """
        traffic = self.traffic
        clients = range(self.settings.num_clients)
        per_client = max(traffic.of_client(client).num_bytes for client in clients)
        total = f"{as_size(per_client)} per client, {as_size(traffic.total().num_bytes)} in all"
        if traffic.open_questions:
            total += f" at most, {as_size(traffic.total('least').num_bytes)} at least"
        on_disk = [as_size(sum(sizes.values())) for sizes in (self.client_disk, self.server_disk)]
        lines = [
            f"planned      messages: {total}",
            (
                f"planned      memory: about {as_size(self.client.peak)} per client and"
                f" {as_size(self.server.peak)} of the server; disk: {on_disk[0]} per client and"
                f" {on_disk[1]} of the server"
            ),
        ]
        if not self.simulation:
            lines.append(
                f"planned      memory of Flower's processes: {as_size(self.superlink.peak)} of the"
                f" SuperLink and {as_size(self.supernode.peak)} of a SuperNode; disk of the"
                f" SuperLink {as_size(self.work.superlink_disk())}"
            )
        lines.append(f"planned      time: a client's round {self._short_time(speeds)}")
        return "\n".join(lines)

    def _short_time(self, speeds: Speeds) -> str:
        speed = f"{speeds.teraflops:.3g} teraflops"
        if speeds.measured:
            computed = duration(speeds.seconds(self.work.operations()), tenths=True)
            return f"{computed} of computing at {speed}, as measured on this machine"
        round_time = duration(self.seconds_of_round(0, speeds), tenths=True)
        line = f"{speeds.megabits:g} megabits per second"
        return f"{round_time} at {speed} and {line} (espalier plan takes other speeds)"

    def long(self, speeds: Speeds) -> str:
        """Return the whole estimate."""
        paragraphs = [self._head(), self._bytes(), self._memory(), self._disk(), self._time(speeds)]
        return "\n\n".join("\n".join(lines) for lines in paragraphs)

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
            trained = of_all_rounds(strategy.averaged, self.settings).num_parameters
            lines.append(f"a client trains {trained:,} parameters at most")
        return lines

    def _bytes(self) -> list[str]:
        questions = self.traffic.open_questions
        at_most = ", at most" if questions else ""
        rows = [("round", "message", "down", "up", "messages"), *self._shortened()]
        lines = [f"Bytes of one client (client 0), by round{at_most}", *_table(rows)]
        cases: dict[str, Case] = {"in all": "most"}
        if questions:
            cases = {"in all, at least": "least", "in all, at most": "most"}
        for name, case in cases.items():
            sums = self.traffic.of_client(0, case)
            total = self.traffic.total(case)
            lines.append(
                f"{name}: {as_size(sums.down)} down and {as_size(sums.up)} up per client,"
                f" {as_size(total.down)} and {as_size(total.up)} at the server in"
                f" {count(total.messages, 'request')}; largest message {as_size(total.largest)}"
            )
        return [*lines, f"left open: {questions}"] if questions else lines

    def _shortened(self) -> Iterator[tuple[str, ...]]:
        """Yield the rows of client 0, with consecutive rounds of equal messages combined."""
        rounds: dict[int, list[tuple[Kind, Traffic]]] = {}
        for (number, kind), traffic in self.traffic.by_kind(0).items():
            rounds.setdefault(number, []).append((kind, traffic))
        for rows, equal in groupby(sorted(rounds), rounds.__getitem__):
            numbers = list(equal)
            last = f" to {numbers[-1]}, each" if len(numbers) > 1 else ""
            for kind, traffic in rows:
                sizes = (as_size(traffic.down), as_size(traffic.up), str(traffic.messages))
                yield f"{numbers[0]}{last}", kind, *sizes

    def _memory(self) -> list[str]:
        lines = [
            "Memory, resident at its peak (libraries: measured constants; the rest: from shapes)"
        ]
        for who, memory in (
            ("a client", self.client),
            ("the server", self.server),
            ("the SuperLink", self.superlink),
            ("a SuperNode", self.supernode),
        ):
            lines.append(
                f"  {who:<14} {as_size(memory.peak):>9}: libraries {as_size(memory.libraries)};"
                f" {memory.largest.name}: {in_words(memory.largest.parts)}"
            )
        return lines

    def _disk(self) -> list[str]:
        rows = (
            ("a client", sum(self.client_disk.values()), in_words(self.client_disk)),
            ("the server", sum(self.server_disk.values()), in_words(self.server_disk)),
            ("the SuperLink", self.work.superlink_disk(), "messages under way"),
            ("a SuperNode", 0, "messages are in its memory"),
        )
        lines = [f"  {who:<14} {as_size(total):>9}: {what}" for who, total, what in rows]
        return ["Disk, at its fullest", *lines]

    def _time(self, speeds: Speeds) -> list[str]:
        operations = self.work.operations()
        rounds = self.traffic.strategy.num_rounds
        alone = any(exchange.kind == "local_baseline" for exchange in self.traffic.exchanges()[0])
        everything = self.traffic.of_client(0).num_bytes
        # The local baseline repeats the work of all rounds.
        run_seconds = speeds.seconds(rounds * operations * (2 if alone else 1), everything)
        how = "measured on this machine" if speeds.measured else "stated"
        round_time = duration(self.seconds_of_round(0, speeds), tenths=True)
        return [
            (
                "Time, an estimate (operations by speed, bytes by line; without the server's work,"
                " starts and reading)"
            ),
            (
                f"  a client's round: {operations / TERA:.3g} T operations, {round_time} with"
                f" {speeds.teraflops:.3g} teraflops ({how}) and {speeds.megabits:g} megabits per"
                " second"
            ),
            (
                f"  a client in {count(rounds, 'round')}{', and by itself' if alone else ''}:"
                f" {duration(run_seconds, tenths=True)}"
            ),
        ]


def in_words(parts: Mapping[str, int]) -> str:
    """Return the sizes of all parts that are not empty, as text."""
    return ", ".join(f"{name} {as_size(size)}" for name, size in parts.items() if size)


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  "
        + "  ".join(
            # Round and message are text, all other columns are numbers.
            cell.ljust(width) if place < 2 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
