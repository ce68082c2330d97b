"""Progress reports reach the listener of their thread and become lines every few seconds."""

from threading import Thread

from espalier.progress import (
    PercentDone,
    Throttle,
    progress_listener,
    progress_prefix,
    report_each,
    report_progress,
    with_progress,
)


def test_where_nobody_listens_nothing_happens() -> None:
    report_progress("block 1 of 2")
    assert list(report_each("ab", "block")) == ["a", "b"]


def test_each_part_is_told_when_it_begins() -> None:
    heard: list[str] = []
    with progress_listener(heard.append):
        for part in report_each("abc", "block"):
            heard.append(part)
    report_progress("after")
    assert heard == ["block 1 of 3", "a", "block 2 of 3", "b", "block 3 of 3", "c"]


def test_inner_listener_hears_alone_until_it_ends() -> None:
    outer: list[str] = []
    inner: list[str] = []
    with progress_listener(outer.append):
        with progress_listener(inner.append):
            report_progress("within")
        report_progress("without")
    assert (outer, inner) == (["without"], ["within"])


def test_another_thread_s_progress_texts_are_not_heard() -> None:
    heard: list[str] = []
    with progress_listener(heard.append):
        other = Thread(target=report_progress, args=("elsewhere",))
        other.start()
        other.join()
    assert heard == []


def test_line_every_ten_seconds_has_elapsed_time() -> None:
    seconds = [100.0]
    lines = list[str]()
    throttle = Throttle(lines.append, lambda: seconds[0], every=10.0)
    for at in (101.0, 109.0, 110.0, 119.0, 120.5, 130.0, 131.0):
        seconds[0] = at
        throttle(f"step {at:.0f}")
    assert lines == ["step 110  [10 s]", "step 120  [20 s]", "step 131  [31 s]"]


def test_line_of_another_kind_delays_the_next() -> None:
    seconds = [0.0]
    lines = list[str]()
    throttle = Throttle(lines.append, lambda: seconds[0], every=10.0)
    for at in (9.0, 12.0, 19.0):
        seconds[0] = at
        throttle(f"step {at:.0f}")
        if at == 9.0:
            throttle.another_line()
    assert lines == ["step 19  [19 s]"]


def test_progress_texts_are_labelled_for_listener() -> None:
    heard: list[str] = []
    with progress_prefix("client 3"):
        report_progress("unheard")
    with progress_listener(heard.append):
        with progress_prefix("client 3"):
            report_progress("block 1 of 2")
        report_progress("block 2 of 2")
    assert heard == ["client 3: block 1 of 2", "block 2 of 2"]


def test_share_is_told_with_time_left() -> None:
    seconds = [100.0]
    heard = list[str]()
    percent = PercentDone("reading a.txt", 800, lambda: seconds[0])
    # There is no listener.
    percent(100)
    with progress_listener(heard.append):
        # The pace is not known yet.
        percent(0)
        for at, done in ((110.0, 200), (130.0, 600), (140.0, 800), (150.0, 900)):
            seconds[0] = at
            percent(done)
    assert heard == [
        "reading a.txt: 25%, 30 s left",
        "reading a.txt: 75%, 10 s left",
        "reading a.txt: 100%, 0 s left",
        # The file grew during the work.
        "reading a.txt: 100%, 0 s left",
    ]


def test_many_parts_are_told_in_shares() -> None:
    heard: list[str] = []
    with progress_listener(heard.append):
        assert list(with_progress("abcd", "encoding")) == ["a", "b", "c", "d"]
    assert [line.split(",")[0] for line in heard] == [
        "encoding: 25%",
        "encoding: 50%",
        "encoding: 75%",
    ]
