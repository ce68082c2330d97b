"""Beats reach who listens, in its thread alone, and become lines every few seconds."""

from threading import Thread

from espalier.pace.beats import Pace, beat, beats, heard_by


def test_where_nobody_listens_nothing_happens() -> None:
    beat("block 1 of 2")
    assert list(beats("ab", "block")) == ["a", "b"]


def test_each_part_is_told_when_it_begins() -> None:
    heard: list[str] = []
    with heard_by(heard.append):
        for part in beats("abc", "block"):
            heard.append(part)
    beat("after")
    assert heard == ["block 1 of 3", "a", "block 2 of 3", "b", "block 3 of 3", "c"]


def test_who_listens_within_hears_alone_and_gives_back() -> None:
    outer: list[str] = []
    inner: list[str] = []
    with heard_by(outer.append):
        with heard_by(inner.append):
            beat("within")
        beat("without")
    assert (outer, inner) == (["without"], ["within"])


def test_another_thread_s_beats_are_not_heard() -> None:
    heard: list[str] = []
    with heard_by(heard.append):
        other = Thread(target=beat, args=("elsewhere",))
        other.start()
        other.join()
    assert heard == []


def test_a_line_every_ten_seconds_with_the_time_since_the_work_began() -> None:
    seconds, lines = [100.0], list[str]()
    pace = Pace(lines.append, lambda: seconds[0], every=10.0)
    for at in (101.0, 109.0, 110.0, 119.0, 120.5, 130.0, 131.0):
        seconds[0] = at
        pace(f"step {at:.0f}")
    assert lines == ["step 110  [10 s]", "step 120  [20 s]", "step 131  [31 s]"]


def test_a_line_of_another_kind_puts_the_next_one_off() -> None:
    seconds, lines = [0.0], list[str]()
    pace = Pace(lines.append, lambda: seconds[0], every=10.0)
    for at in (9.0, 12.0, 19.0):
        seconds[0] = at
        pace(f"step {at:.0f}")
        if at == 9.0:
            pace.another_line()
    assert lines == ["step 19  [19 s]"]
