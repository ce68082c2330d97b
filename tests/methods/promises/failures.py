"""Promises about repeatability, killed runs, full disks and clients that fail."""

import json
from typing import Any

import pytest
from flwr.app import Message

from espalier.errors import EspalierError
from espalier.hf.opening.opened_model import OpenedModel
from espalier.messages.contract import check_reply
from espalier.messages.contracts import contract_for
from espalier.messages.records import read, write
from espalier.results.run_status import run_status
from espalier.settings.run import parse
from strategies.base.checkpoint import CheckpointFolder
from strategies.base.rounds import RunFailed
from tests.bench import Bench, Killed, events, model_files, results, summary
from tests.methods.promises.federations import Federations, Uninterrupted
from tests.methods.promises.full_disk import FullDisk
from tests.methods.promises.spoiled_replies import SPOILS, spoiled


class FailurePromises(Federations):
    """Runs that repeat, are killed or lose clients."""

    # ----- repeatability --------------------------------------------------------------------------

    def test_same_seed_gives_same_bytes(self, bench: Bench, plain: Uninterrupted) -> None:
        """The first run has activations in memory and a model that stays loaded.

        The second has activations on disk and loads the model for each message.
        """
        grid = bench.grid(activations="disk")
        grid.held = {0: 9, 1: 3, 2: 6}
        for context in grid.contexts.values():
            context.node_config["keep-model"] = False
        again = bench.run(grid, activations="disk")
        assert results(again) == results(plain.folder)
        assert summary(again) == summary(plain.folder)

    def test_killed_and_resumed_equals_never_killed(
        self, evaluated: Bench, whole: Uninterrupted
    ) -> None:
        """The comparison includes all metrics; replies arrive in another order."""
        folder = evaluated.killed(
            lambda header: header.server_round >= self.last_round + (header.kind != "evaluate"),
        )
        assert summary(folder)["status"] == "failed"
        rest = evaluated.grid()
        rest.held = {0: 9, 1: 3, 2: 6}
        resumed = evaluated.run(rest, resume_from=str(folder), deadline_seconds=7.0)
        assert resumed == folder
        assert results(resumed) == results(whole.folder)
        assert summary(resumed) == summary(whole.folder)

    def test_early_killed_run_keeps_its_settings(self, bench: Bench, plain: Uninterrupted) -> None:
        """Clients hold results of the old settings.

        A resumption must not mix them with results of other settings.
        """
        folder = bench.killed(lambda header: (header.kind, header.client) == ("train", 2))
        with pytest.raises(EspalierError, match="seed was 0, is 7"):
            bench.run(bench.grid(seed=7), seed=7, resume_from=str(folder))
        assert json.loads((folder / "summary.json").read_text())["seed"] == 0
        resumed = bench.run(bench.grid(), resume_from=str(folder))
        assert results(resumed) == results(plain.folder)

    def test_killed_run_counts_as_interrupted(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def vanish(*_: object, **__: object) -> None:
            raise Killed

        grid = bench.grid()
        grid.before_push = vanish
        # A SIGKILL leaves no time to note the end.
        monkeypatch.setattr("server_app.app._note_end", vanish)
        with pytest.raises(Killed):
            bench.run(grid)
        (folder,) = (bench.folder / "runs").iterdir()
        document = json.loads((folder / "summary.json").read_text())
        # No process was left to change the status.
        assert document["status"] == "running"
        assert run_status(folder)[0] == "interrupted"
        assert (document["finished"], document["missing"]) == (None, [])

    def test_full_disk_at_checkpoint_loses_no_round(
        self, bench: Bench, plain: Uninterrupted, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with FullDisk("/runs/", monkeypatch) as disk:
            save = CheckpointFolder.save

            def save_on_full_disk(folder: CheckpointFolder, server_round: int, *state: Any) -> None:
                # From the checkpoint of the last round on, nothing can be written any more.
                disk.full = disk.full or server_round == self.last_round
                save(folder, server_round, *state)

            monkeypatch.setattr(CheckpointFolder, "save", save_on_full_disk)
            with pytest.raises(
                EspalierError,
                match=r"cannot write .*checkpoint/state.json: No space left on device",
            ):
                bench.run()
        monkeypatch.setattr(CheckpointFolder, "save", save)
        (folder,) = (bench.folder / "runs").iterdir()
        # The full disk had no room for another status.
        assert run_status(folder)[0] == "interrupted"
        finished = folder / "checkpoint" / "state.json"
        assert (
            json.loads(finished.read_text())["round"] if finished.exists() else 0
        ) == self.last_round - 1
        resumed = bench.run(bench.grid(), resume_from=str(folder))
        assert results(resumed) == results(plain.folder)
        assert summary(resumed) == summary(plain.folder)

    def test_full_server_disk_drops_no_client(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        grid = bench.grid()
        with FullDisk("/runs/", monkeypatch) as disk:

            def fill(message: Message) -> None:
                disk.full = disk.full or read(message.content).header.kind == "train"

            grid.before_push = fill
            with pytest.raises(OSError, match="No space left on device"):
                bench.run(grid)
        (folder,) = (bench.folder / "runs").iterdir()
        assert not [event for event in events(folder) if event["event"] == "dropped"]

    def test_full_site_disk_drops_that_site_alone(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with FullDisk("/node-00002/", monkeypatch) as disk:
            disk.full = True
            clients = summary(bench.run())["clients"]
        assert [client["status"] for client in clients] == [
            "completed",
            "completed",
            "dropped",
            "completed",
        ]
        assert "No space left on device" in clients[2]["reason"]

    # ----- failures -------------------------------------------------------------------------------

    def test_one_client_dead_the_round_still_ends(self, without_client_2: Uninterrupted) -> None:
        document = summary(without_client_2.folder)
        assert document["status"] == "completed"
        assert [client["status"] for client in document["clients"]] == [
            "completed",
            "completed",
            "dropped",
            "completed",
        ]
        assert "no reply before the deadline (2 of 2 attempts)" in document["clients"][2]["reason"]

    def test_a_lost_message_is_sent_again(self, bench: Bench, plain: Uninterrupted) -> None:
        grid = bench.grid()
        lost = []

        def lose_the_first(request: Message, reply: Message) -> Message | None:
            if read(request.content).header.kind == "train" and not lost:
                return lost.append(reply)
            return reply

        grid.tamper[2] = lose_the_first
        folder = bench.run(grid)
        assert {client["status"] for client in summary(folder)["clients"]} == {"completed"}
        assert model_files(folder) == model_files(plain.folder)

    @pytest.mark.parametrize("spoil", sorted(SPOILS))
    def test_a_malformed_reply_is_refused(self, plain: Uninterrupted, spoil: str) -> None:
        settings = parse(plain.bench.config())
        model = OpenedModel(self.model_of_clients(plain))
        pairs = zip(plain.requests, plain.received, strict=True)
        request, reply = next(
            (r, a)
            for r, (client, a) in pairs
            if client == 2 and read(r.content).header.kind == "train"
        )
        asked = read(request.content)
        # Spoil a copy, because other tests read the same run.
        copied = Message(write(read(reply.content)), reply_to=request)
        contract = contract_for(asked, lambda: model.plan, settings)
        # The copy itself satisfies the contract, so that the spoiled part is the reason.
        check_reply(read(copied.content), asked, contract)
        with pytest.raises(EspalierError):
            check_reply(read(SPOILS[spoil](copied).content), asked, contract)

    def test_a_malformed_reply_costs_its_sender_alone(
        self, bench: Bench, without_client_2: Uninterrupted
    ) -> None:
        grid = bench.grid()
        grid.tamper[2] = spoiled(SPOILS["garbage"])
        folder = bench.run(grid)
        statuses = {client["client"]: client["status"] for client in summary(folder)["clients"]}
        assert statuses == {0: "completed", 1: "completed", 2: "dropped", 3: "completed"}
        assert model_files(folder) == model_files(without_client_2.folder)
        assert any(event["event"] == "dropped" and event["client"] == 2 for event in events(folder))

    def test_run_without_quorum_ends_with_reasons(self, bench: Bench) -> None:
        grid = bench.grid()
        for client in (0, 1, 3):
            grid.tamper[client] = spoiled(SPOILS["garbage"])
        with pytest.raises(RunFailed, match="the quorum is 2 of num-clients = 4"):
            bench.run(grid)
        (folder,) = (bench.folder / "runs").iterdir()
        document = summary(folder)
        assert document["status"] == "failed"
        assert document["reason"].count("reply refused") == 3
