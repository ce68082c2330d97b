"""Numbers of rounds with which methods send as many bytes as a reference."""

from pathlib import Path
from typing import Any

from benchmarks.task_runs.equal_bytes import MOST_ROUNDS, rounds_within
from espalier.hf.opening.opened_model import open_model
from espalier.settings.run import parse
from server_app.estimate.messages.traffic import RunTraffic, unread_tests
from tests.bench import Bench


def test_rounds_are_the_most_that_fit(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "fedpetuning", {"federation.rounds": 4, "lora.rank": 2})
    model = open_model(str(bench.model))

    def num_bytes(settings: dict[str, Any]) -> int:
        run = parse(settings)
        return RunTraffic(run, model, unread_tests(run, model)).total().num_bytes

    reference = bench.config()
    assert rounds_within(reference, reference, model) == 4
    half = bench.config(fedpetuning__aggregation="ffa")
    found = rounds_within(half, reference, model)
    assert 4 < found < MOST_ROUNDS
    assert num_bytes({**half, "federation.rounds": found}) <= num_bytes(reference)
    assert num_bytes({**half, "federation.rounds": found + 1}) > num_bytes(reference)
    folded = bench.config(fedpetuning__aggregation="fedex")
    assert rounds_within(folded, reference, model) < 4
