"""Optional parts of a method, tried with the toy."""

import json
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from client_app.protocol.push import store_part
from client_app.site import Site
from espalier.messages.contract import Contract, Side
from espalier.messages.message import Fields, MessageBody
from espalier.messages.parts import Sha256
from espalier.messages.records import read
from espalier.storage.blobs import sha256
from strategies.base.rounds import Rounds
from tests.bench import Bench, Killed, summary
from tests.methods.promises.federations import Federations
from tests.tiny_model import save_tiny_llama
from tests.toy_method import contract
from tests.toy_method.contract import ToySettings
from tests.toy_method.strategy import Toy


class Lacks(Fields):
    """Fields of a client's answer to a pushed part."""

    blob_sha256: list[Sha256]


@pytest.mark.usefixtures("toy")
class TestOptions(Federations):
    """Federations of the toy with one more part each."""

    method = "toy"
    settings: ClassVar[dict[str, Any]] = {"toy.strength": 0.5}

    def test_a_push_may_be_answered(
        self, on_own_text: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A client's answer may carry fields of the method's contract.

        Here it lists the blobs that the client lacks.
        """
        told: list[dict[str, Any]] = []
        honest = contract.push_contract
        pushed = Rounds.push_parts

        def push_contract(*arguments: Any) -> Contract:
            return replace(honest(*arguments), up=Side(Lacks))

        def take_part(site: Site, request: MessageBody) -> MessageBody:
            body = store_part(site, request)
            return replace(
                body, fields={"blob_sha256": [sha256(blob) for blob in request.blobs.values()]}
            )

        def push_parts(*arguments: Any) -> list[MessageBody]:
            answers = pushed(*arguments)
            told.extend(body.fields for body in answers)
            return answers

        monkeypatch.setattr(contract, "push_contract", push_contract)
        monkeypatch.setattr("client_app.protocol.push.store_part", take_part)
        monkeypatch.setattr(Rounds, "push_parts", push_parts)
        document = summary(on_own_text.run())
        assert document["finished"] == 4
        assert len(told) == 4
        assert {len(fields["blob_sha256"]) for fields in told} == {1}

    def test_site_may_lack_base_model_if_allowed(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        other = save_tiny_llama(bench.folder / "other", seed=5)

        def enrolled() -> set[str]:
            grid = bench.grid()
            (site,) = [
                context
                for context in grid.contexts.values()
                if context.node_config["partition-id"] == 2
            ]
            site.node_config["model-path"] = str(other)
            return {client["site"] for client in summary(bench.run(grid))["clients"]}

        assert "node-00002" not in enrolled()
        monkeypatch.setattr(ToySettings, "NEEDS_BASE_MODEL", False)
        brought = bench.model
        monkeypatch.setattr("client_app.site.downloaded_model", lambda *_: brought)
        assert "node-00002" in enrolled()

    def test_decisions_are_checkpointed_before_orders(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A resumed run does not decide again."""
        decided: list[int] = []

        def before_round(_: Toy, server_round: int) -> bool:
            decided.append(server_round)
            return True

        def kill(message: Any) -> None:
            if read(message.content).header.kind == "train" and len(decided) == 2:
                (folder,) = (bench.folder / "runs").iterdir()
                saved = json.loads((folder / "checkpoint" / "state.json").read_text())
                assert (saved["round"], saved["state"]["prepared"]) == (1, 2)
                before = json.loads((folder / "checkpoint" / "previous.json").read_text())
                # The server can fall back to this checkpoint if the new one is damaged.
                assert before["round"] == 0
                raise Killed

        monkeypatch.setattr(Toy, "before_round", before_round)
        grid = bench.grid()
        grid.before_push = kill
        with pytest.raises(Killed):
            bench.run(grid)
        (folder,) = (bench.folder / "runs").iterdir()
        bench.run(resume_from=str(folder))
        assert decided == [1, 2]
