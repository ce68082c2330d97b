"""The orchestration benchmark splits the wall time into parts that add up to it."""

from benchmarks.speed.orchestration import split


def test_a_run_of_two_rounds_is_split_as_on_paper() -> None:
    events = [
        ({"event": "begin", "title": "enrolling"}, 1.0),
        ({"event": "method"}, 5.0),
        ({"event": "begin", "title": "masks"}, 5.5),
        ({"event": "masks", "client": 1, "seconds": 1.5}, 7.0),
        ({"event": "masks", "client": 0, "seconds": 2.5}, 8.0),
        ({"event": "begin", "title": "voting"}, 9.0),
        ({"event": "checkpoint"}, 10.0),
        ({"event": "begin", "title": "masks"}, 10.0),
        ({"event": "masks", "client": 0, "seconds": 3.5}, 11.0),
        ({"event": "masks", "client": 1, "seconds": 2.0}, 12.0),
        ({"event": "begin", "title": "voting"}, 12.0),
        ({"event": "checkpoint"}, 12.5),
        ({"event": "local_baseline"}, 14.0),
        ({"event": "local_baseline"}, 15.0),
        ({"event": "exported"}, 17.0),
        ({"event": "evaluated"}, 18.0),
    ]
    parts = split(events, 20.0, at_once=True)
    assert parts == {
        "start-up": 5.0,
        "clients": 3.5,
        "waiting": 2.5,
        "server": 4.5,
        "evaluation": 2.5,
        "end": 2.0,
    }
    assert sum(parts.values()) == 20.0
    one_after_the_other = split(events, 20.0, at_once=False)
    assert one_after_the_other == {**parts, "clients": 5.5, "waiting": 0.5}
