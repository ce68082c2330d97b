"""Resumption of FedPETuning: killed rounds, times and ledgers."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from espalier.errors import EspalierError
from espalier.messages.ledger import Ledger
from strategies.base.checkpoint import CheckpointFolder
from tests.bench import Bench, Killed, model_files, results, summary
from tests.methods.promises.federations import third_order_of
from tests.methods.tuning.fedpetuning_runs import FedPETuningRuns


class TestFedPETuning(FedPETuningRuns):
    @pytest.mark.parametrize(
        "changes",
        [
            {"federation__wire_dtype": "nf4", "fedpetuning__aggregation": "svd"},
            {
                "federation__wire_dtype": "nf4",
                "federation__fleet": "low",
            },
        ],
        ids=["svd", "carried"],
    )
    def test_run_killed_within_round_resumes_equal(
        self, bench: Bench, changes: dict[str, Any]
    ) -> None:
        changes = {"federation__rounds": 3, **changes}
        uninterrupted = bench.run(**changes)
        folder = bench.killed(third_order_of(2), **changes)
        resumed = bench.run(resume_from=str(folder), **changes)
        assert results(resumed) == results(uninterrupted)
        assert summary(resumed) == summary(uninterrupted)

    def test_set_back_run_resumes_equal(self, bench: Bench) -> None:
        """This is the documented remedy for a damaged checkpoint.

        A client that was ahead of the server repeats its stored replies.
        """
        changes = {"federation__rounds": 3}
        uninterrupted = bench.run(**changes)
        folder = bench.killed(third_order_of(3), **changes)
        (folder / "checkpoint" / "previous.json").replace(folder / "checkpoint" / "state.json")
        resumed = bench.run(resume_from=str(folder), **changes)
        assert {client["status"] for client in summary(resumed)["clients"]} == {"completed"}
        assert model_files(resumed) == model_files(uninterrupted)

    @pytest.mark.parametrize(
        ("fleet", "clients", "reason"),
        [
            (
                "none.toml",
                4,
                (
                    "federation.fleet = 'none.toml': there is no none.toml;"
                    " see conf/devices for examples"
                ),
            ),
            ("a\0b", 4, r"federation.fleet = 'a\x00b': '.*' cannot be read: embedded null byte"),
            ("low", 11, r"federation.fleet = 'low': num-clients = 11: the fleet has 10 devices"),
        ],
    )
    def test_missing_or_too_small_fleet_is_refused(
        self, bench: Bench, fleet: str, clients: int, reason: str
    ) -> None:
        with pytest.raises(EspalierError, match=reason):
            bench.run(num_clients=clients, federation__fleet=fleet)
        assert not (bench.folder / "runs").exists()

    @pytest.mark.parametrize(
        ("place", "name", "entries", "seen"),
        [
            (CheckpointFolder, "save", 4, [1]),
            (Ledger, "record_round", 4, [1, 2]),
            (Ledger, "record_round", 6, [1, 2]),
        ],
        ids=["before its checkpoint", "behind it", "among its times"],
    )
    def test_round_times_are_told_once_despite_kills(
        self,
        bench: Bench,
        monkeypatch: pytest.MonkeyPatch,
        place: type,
        name: str,
        entries: int,
        seen: list[int],
    ) -> None:
        """The server is killed in round 2 at three places.

        - before the checkpoint, so that the round is repeated
        - after the checkpoint, before the entries of the ledger
        - among the entries of the ledger
        """
        changes = {"federation__rounds": 3, "federation__fleet": "low"}
        usual = getattr(place, name)
        calls = list[int]()

        def fail(self: Any, first: Any, *rest: Any) -> None:
            calls.append(1)
            if len(calls) > entries if place is Ledger else first == 2:
                raise Killed
            usual(self, first, *rest)

        with monkeypatch.context() as patch:
            patch.setattr(place, name, fail)
            with pytest.raises(Killed):
                bench.run(**changes)
        (killed,) = bench.runs()
        assert len(self._told(killed)) == entries
        assert [one["round"] for one in summary(killed)["clients"][0]["rounds"]] == seen, (
            "of finished rounds alone"
        )
        folder = bench.run(resume_from=str(killed), **changes)
        assert self._told(folder) == [
            (number, client) for number in (1, 2, 3) for client in range(4)
        ]
        rounds = [
            [one["round"] for one in client["rounds"]] for client in summary(folder)["clients"]
        ]
        assert rounds == 4 * [[1, 2, 3]]

    def _told(self, folder: Path) -> list[tuple[int, int]]:
        """Return rounds and clients whose times are in the ledger."""
        entries = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
        return [(entry["round"], entry["client"]) for entry in entries if entry["kind"] == "round"]

    def test_a_torn_ledger_does_not_hold_a_run_up(self, bench: Bench) -> None:
        """A machine that goes down may leave half a line; its time is recorded again."""
        changes = {"federation__rounds": 2, "federation__fleet": "low"}
        folder = bench.killed(lambda header: header.server_round == 2, **changes)
        ledger = folder / "ledger.jsonl"
        lines = ledger.read_text().splitlines(keepends=True)
        last = max(place for place, line in enumerate(lines) if '"kind": "round"' in line)
        ledger.write_text("".join(lines[:last]) + lines[last][:-20])
        resumed = bench.run(resume_from=str(folder), **changes)
        readable = [
            line
            for line in (resumed / "ledger.jsonl").read_text().splitlines()
            if line.endswith("}")
        ]
        told = [entry["round"] for entry in map(json.loads, readable) if entry["kind"] == "round"]
        assert Counter(told) == {1: 4, 2: 4}

    def test_a_ledger_that_cannot_be_read_is_named(self, bench: Bench) -> None:
        changes = {"federation__rounds": 2}
        folder = bench.killed(lambda header: header.server_round == 2, **changes)
        (folder / "ledger.jsonl").unlink()
        (folder / "ledger.jsonl").mkdir()
        with pytest.raises(EspalierError, match=r"ledger\.jsonl: cannot be read: Is a directory"):
            bench.run(resume_from=str(folder), **changes)
