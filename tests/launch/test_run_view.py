"""What the live view shows of a log, and which lines it leaves to be printed."""

from io import StringIO

from rich.console import Console

from espalier.launch.narrow_table import NarrowTable
from espalier.launch.run_view import RunView
from espalier.run_lines import LabelledLine, PhaseLine, StepLine


class Watch:
    """View with a clock that is set by hand."""

    def __init__(self, num_clients: int = 2) -> None:
        self.seconds = 0.0
        self.view = RunView("flap", lambda: self.seconds)
        if num_clients:
            assert self.take(PhaseLine("enrolling", num_clients, of_clients=True))
        for client in range(num_clients):
            assert self.step("enrolling", client + 1, num_clients, f"site-{client}: client 1")

    def take(self, line: object) -> bool:
        return self.view.take(str(line))

    def step(self, phase: str, done: int, total: int, text: str) -> bool:
        return self.take(StepLine(phase, done, total, text).line(1.0, 1.0))

    def begin(self, phase: str, total: int, server_round: tuple[int, int] | None = None) -> None:
        of_clients = server_round is not None
        assert self.take(PhaseLine(phase, total, of_clients, server_round))

    def report_progress(self, who: str, text: str) -> bool:
        return self.take(f"{LabelledLine(who, text)}  [11 s]")

    def lines(self, width: int = 90, height: int = 30) -> list[str]:
        console = Console(file=StringIO(), width=width, height=height, color_system=None)
        with console.capture() as shown:
            console.print(self.view)
        return [line.rstrip() for line in shown.get().splitlines()]


def test_clients_at_work_come_before_those_that_have_answered() -> None:
    watch = Watch(3)
    watch.begin("training", 3, (1, 1))
    watch.step("training", 1, 3, "site-0: adapters, 9 s of work")
    watch.step("training", 2, 3, "site-1: adapters, 8 s of work")
    watch.report_progress("site-2", "train: step 2 of 20")
    assert watch.lines()[:4] == [
        "flap · training 2/3 clients ████████████████░░░░░░░░",
        "  site-2       train: step 2 of 20",
        "  site-1       adapters, 8 s of work",
        "  site-0       adapters, 9 s of work",
    ]
    # The next phase begins with nobody.
    watch.begin("averaging", 6)
    assert len(watch.lines()) == 2


def test_client_may_work_before_it_is_enrolled() -> None:
    watch = Watch(0)
    watch.take(PhaseLine("enrolling", 2, of_clients=True))
    watch.report_progress("site-0", "enrol: encoding samples: 12%, 0 s left")
    assert watch.lines()[:2] == [
        "flap · enrolling 0/2 clients ░░░░░░░░░░░░░░░░░░░░░░░░",
        "  site-0       enrol: encoding samples: 12%, 0 s left",
    ]


def test_many_clients_are_counted() -> None:
    watch = Watch(20)
    watch.begin("masks", 20, (1, 1))
    for client in range(12):
        watch.step("masks", client + 1, 20, f"site-{client}: masks")
    watch.report_progress("site-19", "train: block 2 of 5")
    assert watch.lines()[1].startswith("  site-19")
    assert watch.lines()[-2] == "  and 5 more clients"
    # A low terminal has room for one client.
    assert watch.lines(height=6)[1:3] == [
        "  site-19      train: block 2 of 5",
        "  and 12 more clients",
    ]


def test_dropped_client_is_printed_and_no_longer_at_work() -> None:
    watch = Watch()
    watch.begin("training", 2, (1, 1))
    watch.report_progress("site-0", "train: step 2 of 20")
    assert not watch.take("dropped      site-0: train: no reply before the deadline")
    assert len(watch.lines()) == 2


def test_time_left_of_all_rounds_follows_from_finished_ones() -> None:
    watch = Watch()
    watch.seconds = 10.0
    watch.begin("training", 2, (1, 4))
    assert watch.lines()[-1] == "  10 s elapsed"
    watch.seconds = 20.0
    watch.step("training", 1, 2, "site-0: adapters")
    # Half of one of four rounds took ten seconds.
    assert watch.lines()[-1] == "  20 s elapsed, about 70 s left of the rounds"
    watch.begin("averaging", 6)
    watch.seconds = 30.0
    assert watch.lines()[-1] == "  30 s elapsed, about 60 s left of the rounds"
    assert not watch.take("checkpoint   after round 1")
    watch.begin("training", 2, (2, 4))
    assert watch.lines()[-1] == "  30 s elapsed, about 60 s left of the rounds"


def test_resumed_run_counts_only_rounds_that_it_saw() -> None:
    watch = Watch()
    watch.begin("training", 2, (3, 4))
    watch.seconds = 8.0
    watch.step("training", 1, 2, "site-0: adapters")
    assert watch.lines()[0].startswith("flap · round 3 of 4 · training 1/2 clients ")
    assert watch.lines()[-1] == "  8 s elapsed, about 24 s left of the rounds"


def test_time_left_of_a_later_phase() -> None:
    watch = Watch()
    watch.begin("training", 2, (2, 2))
    watch.take("checkpoint   after round 2")
    watch.begin("evaluating", 3)
    watch.seconds = 5.0
    watch.step("evaluating", 1, 3, "dense: code 94.75")
    lines = watch.lines()
    assert lines[0] == "flap · 2 rounds done · evaluating 1/3 ████████░░░░░░░░░░░░░░░░"
    assert lines[-1] == "  5 s elapsed, about 10 s left of evaluating"


def test_quality_has_the_last_rounds_and_then_the_models() -> None:
    watch = Watch()
    for number in range(1, 6):
        assert not watch.take(f"measured     after round {number}: code 8{number}.00, f1 0.512")
    assert watch.lines()[-2] == (
        "  quality round 5: code 85.00, f1 0.512 · round 4: code 84.00, f1 0.512 · round 3: code 8…"
    )
    watch.step("evaluating", 1, 2, "dense: code 94.75")
    watch.step("evaluating", 2, 2, "federated: code 97.10")
    assert watch.lines()[-2] == "  quality dense: code 94.75 · federated: code 97.10"


def test_server_s_own_work_is_the_phase() -> None:
    watch = Watch(0)
    assert watch.report_progress("opening", "block 2 of 30")
    assert watch.lines()[:2] == ["flap · opening", "  block 2 of 30"]
    assert watch.take(PhaseLine("enrolling", 2, of_clients=True))
    assert watch.take("enrolling    1 of 2 sites connected, waiting up to 1 h for more")
    assert watch.lines()[1] == "  1 of 2 sites connected, waiting up to 1 h for more"
    watch.begin("training", 2, (1, 1))
    assert watch.report_progress("training", "waiting for site-0 (asked 3 min ago)")
    assert watch.lines()[1] == "  waiting for site-0 (asked 3 min ago)"


def test_long_step_of_the_server_has_its_time_left() -> None:
    watch = Watch()
    watch.begin("aligning", 1)
    watch.report_progress("aligning", "teacher's block 6 of 6")
    watch.seconds = 20.0
    watch.report_progress("aligning", "training step 1 of 100")
    assert watch.lines()[:2] == ["flap · aligning", "  training step 1 of 100"]
    watch.seconds = 50.0
    watch.report_progress("aligning", "training step 11 of 100")
    # Ten steps took 30 seconds, and 90 are not finished.
    assert watch.lines()[1] == "  training step 11 of 100, about 4 min 30 s left"


def test_other_lines_are_printed() -> None:
    watch = Watch()
    for line in ("", "run directory /runs/1", "the run failed: no quorum", "warning: nothing"):
        assert not watch.take(line)


# ----- tables -------------------------------------------------------------------------------------

TABLE = [
    "┏━━━━━━━┳━━━━━━━━━┓",
    "┃ model ┃ code    ┃",
    "┡━━━━━━━╇━━━━━━━━━┩",
    "│ dense │ 94 || 5 │",
    "│ local │       - │",
    "└───────┴─────────┘",
]


def passed(lines: list[str], width: int) -> list[str]:
    shown: list[str] = []
    table = NarrowTable(shown.append, lambda: width)
    for line in lines:
        table(line)
    table.flush()
    return shown


def test_table_that_fits_is_unchanged() -> None:
    assert passed(["before", *TABLE, "after"], 19) == ["before", *TABLE, "after"]


def test_narrow_table_is_a_list() -> None:
    assert passed([*TABLE, "after"], 18) == ["dense", "  code  94 || 5", "local", "after"]


def test_incomplete_table_is_unchanged() -> None:
    assert passed(TABLE[:4], 5) == TABLE[:4]
    assert passed([*TABLE[:3], "an error"], 5) == [*TABLE[:3], "an error"]


def test_event_that_ends_like_progress_is_printed() -> None:
    """The reason of a refusal is a site's text, which may end with a time in brackets."""
    watch = Watch(2)
    watch.begin("training", 2, (1, 1))
    for label in ("refused", "dropped", "reconnected", "warning:"):
        assert not watch.report_progress(label, "site-1: waited")
    assert all("waited" not in line for line in watch.lines())
