"""Sub-model of FedSODA: its pieces, their hashes, and clients that lost them.

The server sends it to clients without a base model.
"""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message
from transformers import AutoModelForCausalLM

from espalier.errors import EspalierError
from espalier.messages.blobs.model_pieces import Manifest
from espalier.messages.message import MessageBody
from espalier.messages.records import address, read
from espalier.messages.tensor_blobs import pack_tensors
from strategies.base.rounds import RunFailed
from strategies.tuning.fedsoda import sub_model
from tests.bench import Bench, Killed, model_files, summary
from tests.methods.promises.federations import Uninterrupted
from tests.methods.tuning.fedsoda.fedsoda_runs import BLOCKS, FedSodaRuns, _zeros, asked


class TestFedSoda(FedSodaRuns):
    def test_the_sub_model_is_a_model_of_its_own(self, plain: Uninterrupted) -> None:
        """The sub-model loads in transformers and has the reported size.

        It lacks a block whose output resembled its input.
        """
        folder = plain.folder / "sub-model"
        report = summary(plain.folder)["report"]
        (gone,), ((full, smaller),) = report["dropped_blocks"], report["groups"]
        assert gone == full + 1
        assert smaller == full
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert len(model.model.layers) == BLOCKS - 1
        base = AutoModelForCausalLM.from_pretrained(plain.bench.model)
        kept = [index for index in range(BLOCKS) if index != gone]
        for place, index in enumerate(kept):
            ours, theirs = (
                m.model.layers[i].input_layernorm.weight for m, i in ((model, place), (base, index))
            )
            torch.testing.assert_close(ours.cpu(), theirs, check_dtype=False)
        offered = asked(plain.requests, "model")[0].fields
        assert report["sub_model_bytes"] == sum(offered["sizes"])

    def test_clients_get_each_missing_piece_once(self, bench: Bench) -> None:
        first = bench.grid()
        requests = list[Message]()
        first.before_push = requests.append
        bench.run(first, federation__rounds=1)
        offers = asked(requests, "model")
        pieces = asked(requests, "piece")
        number = len(offers[0].fields["piece_sha256"])
        assert number > 1
        brought = sorted((body.header.client, body.fields["index"]) for body in pieces)
        assert brought == [
            (client, index) for client in range(bench.num_clients) for index in range(number)
        ]
        again = bench.grid(seed=1)
        requests = list[Message]()
        again.before_push = requests.append
        bench.run(again, federation__rounds=1, seed=1)
        assert len(asked(requests, "model")) == bench.num_clients
        assert not asked(requests, "piece")

    @pytest.mark.parametrize("change", ["another", "more"])
    def test_model_changed_on_disk_is_sent_again(self, bench: Bench, change: str) -> None:
        bench.run(federation__rounds=1)
        (files,) = (bench.folder / "state" / "models").glob("*/files")
        if change == "more":
            (files / "modeling_more.py").write_text("")
        else:
            (files / "config.json").write_text(
                (files / "config.json").read_text().replace("silu", "gelu")
            )
        grid = bench.grid()
        requests = list[Message]()
        grid.before_push = requests.append
        folder = bench.run(grid, federation__rounds=1)
        assert asked(requests, "piece")
        assert {client["status"] for client in summary(folder)["clients"]} == {"completed"}

    @pytest.mark.parametrize("spoil", ["piece", "name", "file"])
    def test_received_bytes_are_checked_by_hash(
        self, bench: Bench, spoil: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A server that sends other bytes, or files that are no part of a model, gets no work."""
        if spoil == "piece":
            zeros = "strategies.tuning.fedsoda.sub_model.SubModelResult.piece"
            monkeypatch.setattr(
                zeros, lambda result, index: bytes(result.manifest.piece_size(index))
            )
            wanted = "piece 0 does not have the hash in the offer"
        # The pieces match the offer, but the file made from them does not.
        elif spoil == "file":
            cut = sub_model.manifest_of
            wanted = "file config.json of the model differs from the announced hash"

            def of_another(folder: Path, piece_bytes: int) -> Manifest:
                honest = cut(folder, piece_bytes)
                changed = ["0" * 64, *honest.file_sha256[1:]]
                return honest.model_copy(update={"file_sha256": changed})

            monkeypatch.setattr(sub_model, "manifest_of", of_another)
        else:
            write = sub_model.write_sub_model
            wanted = "a file has an invalid file name"

            def with_code(base: Any, kept: Any, target: Path, settings: Any) -> None:
                write(base, kept, target, settings)
                (target / "modeling_evil.py").write_text("raise SystemExit")

            monkeypatch.setattr(sub_model, "write_sub_model", with_code)
            monkeypatch.setattr(sub_model, "FILES", re.compile(r".*"))
        with pytest.raises((EspalierError, RunFailed), match=wanted):
            bench.run(federation__rounds=1)

    @pytest.mark.parametrize(
        ("server_round", "what"),
        [(1, "piece"), (1, "emulator"), (1, "train"), (2, "emulator"), (2, "train")],
    )
    def test_client_recovers_lost_state_and_model(
        self, bench: Bench, plain: Uninterrupted, server_round: int, what: str
    ) -> None:
        """The client's state and model are removed right before a message of each kind."""
        grid = bench.grid()
        lost = []

        def lose(message: Message) -> None:
            body = read(message.content)
            kind = body.fields.get("what", body.header.kind)
            header = body.header
            if (kind, header.server_round, header.client) == (what, server_round, 1) and not lost:
                lost.append(header)
                for folder in [
                    *(bench.folder / "state").glob("*/node-00001"),
                    bench.folder / "state" / "models",
                ]:
                    shutil.rmtree(folder)

        grid.before_push = lose
        folder = bench.run(grid)
        assert lost
        assert {client["status"] for client in summary(folder)["clients"]} == {"completed"}
        assert model_files(folder) == model_files(plain.folder)

    def test_late_lost_model_is_brought_again(self, bench: Bench) -> None:
        """The adapter travels in two parts."""
        changes: dict[str, Any] = {
            "fedsoda__adapter_layers": 2,
            "part_bytes": 4096,
            "federation__rounds": 1,
        }
        grid = bench.grid(**changes)
        lost = list[int]()
        whole = bench.run(bench.grid(**changes), **changes)

        def lose(message: Message) -> None:
            if read(message.content).header.kind == "fetch" and not lost:
                lost.append(1)
                shutil.rmtree(bench.folder / "state" / "models")

        grid.before_push = lose
        folder = bench.run(grid, **changes)
        assert lost
        assert {client["status"] for client in summary(folder)["clients"]} == {"completed"}
        assert model_files(folder) == model_files(whole)

    @pytest.mark.parametrize("part", ["document", "blob"])
    def test_client_recovers_a_lost_emulator_part(
        self, bench: Bench, plain: Uninterrupted, part: str
    ) -> None:
        grid = bench.grid()
        lost = []

        def lose(message: Message) -> None:
            header = read(message.content).header
            if (header.kind, header.server_round, header.client) == ("train", 2, 1) and not lost:
                (document,) = (bench.folder / "state").glob("*/node-00001/**/emulator.json")
                kept = json.loads(document.read_text())
                lost.append(kept["kept"][-1]["parts"].popitem())
                if part == "document":
                    document.write_text(json.dumps(kept))
                    return
                (blob,) = lost[0][1].values()
                for file in document.parent.parent.rglob(f"*{blob}*"):
                    file.write_bytes(b"")

        grid.before_push = lose
        folder = bench.run(grid)
        assert lost
        assert {client["status"] for client in summary(folder)["clients"]} == {"completed"}
        assert model_files(folder) == model_files(plain.folder)

    def test_order_for_other_sub_model_is_refused(self, bench: Bench) -> None:
        """Other values of the same alignment are refused too after the round was answered."""
        grid = bench.grid(evaluation__local_baseline=True)
        requests = list[Message]()

        def note(message: Message) -> None:
            requests.append(message)
            if read(message.content).header.kind in ("local_baseline", "evaluate"):
                raise Killed

        grid.before_push = note
        with pytest.raises(Killed):
            bench.run(grid, evaluation__local_baseline=True)
        node, context = next(iter(grid.contexts.items()))

        def ask(body: MessageBody, **changes: Any) -> MessageBody:
            changed = MessageBody(body.header, body.fields | changes, body.blobs)
            return read(grid.answer(address(changed, node, 60.0), context).content)

        order = next(body for body in reversed(asked(requests, "train")) if body.header.client == 0)
        assert "was not sent to this site" in ask(order, model_sha256="0" * 64).fields["reason"]
        assert "of a different round" in ask(order, aligned=3).fields["reason"]
        assert ask(order).header.status != "failed"
        last = next(
            body for body in reversed(asked(requests, "emulator")) if body.header.client == 0
        )
        assert ask(replace(last, blobs=_zeros(last.blobs))).header.status != "failed"
        assert "another request of round 2" in ask(order).fields["reason"]

    def test_real_site_takes_models_only_if_allowed(self, on_own_text: Bench) -> None:
        """A site accepts models up to its limit, which also counts models of earlier runs."""
        grid = on_own_text.grid()
        for client, context in enumerate(grid.contexts.values()):
            context.node_config |= {"site": f"site-{client}", "own-text": True, "min-tokens": 30}
            context.node_config |= {"max-model-bytes": 10**6} if client else {}
        grid.simulated = False
        document = summary(on_own_text.run(grid))
        assert "this site accepts no model from a run's server" in document["refused"]["site-0"]
        assert {client["status"] for client in document["clients"]} == {"completed"}
        (first,) = (on_own_text.folder / "state" / "models").glob("*/files")
        size = sum(file.stat().st_size for file in first.iterdir())
        again = on_own_text.grid(fedsoda__groups=2, fedsoda__group_layers=0)
        for client, context in enumerate(again.contexts.values()):
            context.node_config |= {"site": f"site-{client}", "own-text": True, "min-tokens": 30}
            context.node_config["max-model-bytes"] = int(1.8 * size)
        again.simulated = False
        with pytest.raises(
            RunFailed,
            match=(
                r"models of other runs use or have reserved \d+ bytes,"
                r" so there is no room for this"
            ),
        ):
            on_own_text.run(again, fedsoda__groups=2, fedsoda__group_layers=0)

    def test_a_site_takes_one_model_in_a_run(self, bench: Bench) -> None:
        """A server could otherwise query the same data again and again with other tokenizers."""
        grid = bench.grid()
        requests = list[Message]()
        grid.before_push = requests.append
        bench.killed(lambda header: header.kind == "train", grid)
        offer = asked(requests, "model")[0]
        node, context = next(iter(grid.contexts.items()))

        def answer(**changes: Any) -> MessageBody:
            body = MessageBody(offer.header, offer.fields | changes)
            return read(grid.answer(address(body, node, 60.0), context).content)

        assert answer().fields == {"pieces": []}
        other = answer(file_sha256=["0" * 64, *offer.fields["file_sha256"][1:]])
        assert (
            "the server offered this site another model before in this run"
            in other.fields["reason"]
        )

    def test_a_piece_is_of_the_size_that_was_offered(self, bench: Bench) -> None:
        grid = bench.grid()
        requests = list[Message]()
        grid.before_push = requests.append
        bench.killed(lambda header: header.kind == "train", grid)
        piece = asked(requests, "piece")[0]
        node, context = next(iter(grid.contexts.items()))
        longer = pack_tensors({"bytes": np.zeros(piece.fields["size"] + 1, dtype=np.uint8)})
        body = MessageBody(
            piece.header, piece.fields | {"size": piece.fields["size"] + 1}, {"piece": longer}
        )
        reply = read(grid.answer(address(body, node, 60.0), context).content)
        assert "does not have the size in the offer" in reply.fields["reason"]

    def test_a_site_may_allow_no_model_so_large(self, bench: Bench) -> None:
        grid = bench.grid()
        next(iter(grid.contexts.values())).node_config["max-model-bytes"] = 1000
        client = summary(bench.run(grid))["clients"][0]
        assert client["status"] == "dropped"
        assert "max-model-bytes = 1000: the run's model has " in client["reason"]
