"""FedSODA: promises of every method.

The server sends a sub-model to clients without a base model, and their adapter fits the full model.
"""

import json
import math
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from flwr.app import Message
from safetensors.torch import load, load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import client_app.methods.tuning.fedsoda
from client_app.methods.tuning import fedpetuning as tuning
from espalier.errors import EspalierError
from espalier.hf.opening.opened import OpenedModel, open_model
from espalier.messages.blobs.model_pieces import Manifest
from espalier.messages.message import MessageBody
from espalier.messages.records import address, read
from espalier.messages.tensor_blobs import pack_tensors, unpack_tensors
from espalier.methods.tuning.adapters.tensors import trained
from espalier.models.adapters import Tensors
from espalier.seeds import derive_seed
from espalier.settings.run import parse
from espalier.training.alignment import Alignment, Places, Teacher
from espalier.training.initial_values import initial_values
from espalier.training.loop import Loop
from strategies.base.rounds import RunFailed
from strategies.tuning.fedsoda import sub_model
from tests.bench import Bench, Home, Killed, model_files, private_text, summary
from tests.in_process import InProcessGrid
from tests.methods.promises.federations import Uninterrupted
from tests.methods.promises.promises import Promises, held_out
from tests.tiny_model import save_tiny_llama

SMALL: dict[str, Any] = {
    "federation.rounds": 2,
    "training.steps": 2,
    "training.batch-size": 2,
    "training.learning-rate": 0.01,
    "training.proximal": 0.01,
    "lora.rank": 2,
    "lora.alpha": 4.0,
    "lora.targets": "attn.q,attn.v,mlp.down",
    "lora.merge": True,
    "fedsoda.adapter-layers": 1,
    "fedsoda.group-layers": 1,
    "fedsoda.groups": 1,
    "fedsoda.pre-align-steps": 3,
    "fedsoda.realign-steps": 2,
    "fedsoda.realign-every": 2,
    "fedsoda.public-samples": 4,
    "part-bytes": 65536,
}
EVENLY = {"drop": "uniform"}
SCALING = 2.0
BLOCKS = 4


def asked(requests: list[Message], what: str) -> list[MessageBody]:
    """Return the requests of one kind; kinds of ``deliver`` have names of their own."""
    bodies = [read(request.content) for request in requests]
    return [body for body in bodies if body.fields.get("what", body.header.kind) == what]


def merged(tensors: Mapping[str, torch.Tensor], weight: torch.Tensor, name: str) -> torch.Tensor:
    """Return a weight plus its adapter's update, by the definition."""
    return weight + SCALING * tensors[f"{name}.lora_b"] @ tensors[f"{name}.lora_a"]


class TestFedSoda(Promises):
    """Federations with two rounds on a model of four blocks.

    One block is dropped, and the last block is the adapter. The server aligns before both rounds.
    """

    method = "fedsoda"
    planned_exactly = True
    settings: ClassVar[dict[str, Any]] = SMALL
    last_round = 1
    result_round = 3
    cuts_samples = "all_samples"

    @pytest.fixture(scope="class")
    @classmethod
    def home(cls, tmp_path_factory: pytest.TempPathFactory) -> Home:
        """Create a deeper model that is wide enough for NF4, and two texts.

        One text is for the alignment, the other for the evaluation.
        """
        folder = tmp_path_factory.mktemp("home")
        model = save_tiny_llama(folder / "base", blocks=BLOCKS, hidden=64, feed_forward=64, std=0.1)
        (folder / "public.txt").write_text("\n\n".join(private_text(99).split("\n\n")[:15]))
        (folder / "align.txt").write_text("\n\n".join(private_text(98).split("\n\n")[:15]))
        cls.settings = {**SMALL, "fedsoda.public-text": str(folder / "align.txt")}
        return Home(model, folder / "public.txt")

    def model_of_clients(self, run: Uninterrupted) -> Path:
        """Return the directory of the sub-model."""
        return run.folder / "sub-model"

    def model_at_a_site(self, bench: Bench) -> dict[str, Any]:
        """Return the settings of a node that takes the model from the server."""
        return {"max-model-bytes": 10**6}

    def test_site_with_fewer_positions_is_refused(self, bench: Bench) -> None:
        """Clients need no model of their own: a site's ``model-path`` is ignored."""
        grid = bench.grid()
        for context in grid.contexts.values():
            context.node_config["model-path"] = str(bench.folder)
        assert {client["status"] for client in summary(bench.run(grid))["clients"]} == {"completed"}

    def test_own_text_figures_equal_transformers(self, whole: Uninterrupted) -> None:
        """Clients evaluate the aligned sub-model before and after tuning.

        The test rebuilds both from the messages to a client.
        """
        opened = OpenedModel(whole.folder / "sub-model")
        bench = whole.bench
        model = AutoModelForCausalLM.from_pretrained(
            bench.model, dtype=torch.float32, num_hidden_layers=BLOCKS - 1
        )
        emulator = asked(whole.requests, "emulator")[-1]
        adapter = [
            body for body in asked(whole.requests, "deliver") if body.header.server_round == 3
        ][-1]
        sent = {key: load(blob) for key, blob in (emulator.blobs | adapter.blobs).items()}
        paths = {
            "attn.q": "self_attn.q_proj",
            "attn.v": "self_attn.v_proj",
            "mlp.down": "mlp.down_proj",
        }
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(opened.checkpoint.read(name).float())
        tokenizer = AutoTokenizer.from_pretrained(bench.model)
        found = {"dense": list[float](), "federated": list[float]()}
        for column in found:
            for key in emulator.blobs if column == "dense" else adapter.blobs:
                block = model.model.layers[int(key.removeprefix("block-"))]
                for name, path in paths.items():
                    parameter = block.get_submodule(path).weight
                    parameter.data = merged(sent[key], parameter.data, name)
            for client in range(bench.num_clients):
                passages = [
                    passage for passage in private_text(client).split("\n\n") if held_out(passage)
                ]
                tokens = torch.tensor(tokenizer("\n\n".join(passages))["input_ids"])
                samples = tokens[: len(tokens) // 16 * 16].view(-1, 16)
                with torch.no_grad():
                    losses = [
                        model(input_ids=sample[None], labels=sample[None]).loss.item()
                        for sample in samples
                    ]
                found[column].append(math.exp(sum(losses) / len(losses)))
        tokens = torch.tensor(tokenizer(bench.public.read_text())["input_ids"])
        samples = tokens[: len(tokens) // 16 * 16].view(-1, 16)
        with torch.no_grad():
            losses = [
                model(input_ids=sample[None], labels=sample[None]).loss.item() for sample in samples
            ]
        told = summary(whole.folder)["report"]["sub_model_perplexity"]["public"]
        assert told == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-3)
        clients = summary(whole.folder)["clients"]
        for column, values in found.items():
            told = [client["metrics"][f"perplexity/own-text/{column}"] for client in clients]
            assert told == pytest.approx(values, rel=1e-3)

    # ----- the sub-model --------------------------------------------------------------------------

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
            wanted = "a file has a name that no file of a model has"

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

    def test_no_baseline_without_aligned_emulator(self, bench: Bench) -> None:
        """The client would train and measure another sub-model than the other clients."""
        grid = bench.grid(evaluation__local_baseline=True)
        changes = {"evaluation__local_baseline": True}

        def lose(message: Message) -> None:
            header = read(message.content).header
            if (header.kind, header.client) == ("alone", 1):
                for document in (bench.folder / "state").glob("*/node-00001/lasting/emulator.json"):
                    document.unlink()

        grid.before_push = lose
        client = summary(bench.run(grid, **changes))["clients"][1]
        assert "the emulator's LoRA at this site is of another round" in client["reason"]

    def test_sampling_survives_dropout_and_resumption(self, bench: Bench) -> None:
        few = {"federation__sampled_clients": 0.5, "quorum": 0.25}
        generator = np.random.default_rng(derive_seed(0, "clients", server_round=1))
        drawn = generator.choice(bench.num_clients, 2, replace=False).tolist()
        for poor in (
            drawn[0],
            next(client for client in range(bench.num_clients) if client not in drawn),
        ):

            def grid(poor: int = poor) -> InProcessGrid:
                made = bench.grid(**few)
                made.contexts[list(made.contexts)[poor]].node_config["max-model-bytes"] = 1000
                return made

            whole = bench.run(grid(), **few)
            folder = bench.killed(
                lambda header: (header.kind, header.server_round) == ("train", 1), grid(), **few
            )
            assert model_files(bench.run(grid(), resume_from=str(folder), **few)) == model_files(
                whole
            )

    def test_local_baseline_uses_aligned_emulator(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        beside = list[Any]()
        alone = tuning.alone

        def noted(site: Any, request: MessageBody, given: Any) -> MessageBody:
            beside.append(given)
            return alone(site, request, given)

        monkeypatch.setattr(tuning, "alone", noted)
        grid = bench.grid(evaluation__local_baseline=True)
        requests = list[Message]()
        grid.before_push = requests.append
        bench.run(grid, evaluation__local_baseline=True)
        brought = asked(requests, "emulator")[-1]
        assert len(beside) == bench.num_clients
        for given in beside:
            assert given.plan.blocks.keys() == set(brought.fields["blocks"])
            for key, blob in brought.blobs.items():
                assert all(
                    torch.equal(given.values[key][name], value)
                    for name, value in load(blob).items()
                )

    def test_repeated_evaluation_is_refused(self, on_own_text: Bench) -> None:
        """Each repetition would reveal more about the same text."""
        grid = on_own_text.grid()
        requests = list[Message]()

        def note(message: Message) -> None:
            requests.append(message)
            header = read(message.content).header
            if (header.kind, header.client) == ("evaluate", 1):
                raise Killed

        grid.before_push = note
        with pytest.raises(Killed):
            on_own_text.run(grid)
        node, context = next(iter(grid.contexts.items()))

        def ask(body: MessageBody) -> MessageBody:
            return read(grid.answer(address(body, node, 60.0), context).content)

        evaluation = asked(requests, "evaluate")[0]
        assert evaluation.header.client == 0
        first = ask(evaluation)
        assert ask(evaluation).fields == first.fields
        last = next(
            body for body in reversed(asked(requests, "emulator")) if body.header.client == 0
        )
        assert ask(replace(last, blobs=_zeros(last.blobs))).header.status != "failed"
        assert "answered another request of this run" in ask(evaluation).fields["reason"]

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
            if read(message.content).header.kind in ("alone", "evaluate"):
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
        assert "is of another round" in ask(order, aligned=3).fields["reason"]
        assert ask(order).header.status != "failed"
        last = next(
            body for body in reversed(asked(requests, "emulator")) if body.header.client == 0
        )
        assert ask(replace(last, blobs=_zeros(last.blobs))).header.status != "failed"
        assert "another request of round 2" in ask(order).fields["reason"]

    def test_another_public_text_is_no_resumption(self, bench: Bench) -> None:
        text = bench.folder / "align.txt"
        text.write_text(private_text(98))
        folder = bench.killed(
            lambda header: header.server_round == 2, fedsoda__public_text=str(text)
        )
        text.write_text(private_text(97))
        with pytest.raises(
            EspalierError,
            match=r"fedsoda.public-text = '.*align.txt': is not the text that the run began with",
        ):
            bench.run(resume_from=str(folder), fedsoda__public_text=str(text))

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
            match=r"models of other runs use or have reserved \d+ bytes, so there is no room for this",
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

    def test_run_with_never_sampled_client_resumes(self, bench: Bench) -> None:
        """A client that no round sampled gets the sub-model only for the evaluation."""
        few = {"federation__sampled_clients": 0.25, "evaluation__local_baseline": True}
        whole = bench.run(bench.grid(**few), **few)
        folder = bench.killed(lambda header: header.kind == "evaluate", bench.grid(**few), **few)
        assert json.loads((folder / "checkpoint" / "state.json").read_text())["round"] == 2
        resumed = bench.run(bench.grid(**few), resume_from=str(folder), **few)
        assert model_files(resumed) == model_files(whole)

    def test_a_site_may_allow_no_model_so_large(self, bench: Bench) -> None:
        grid = bench.grid()
        next(iter(grid.contexts.values())).node_config["max-model-bytes"] = 1000
        client = summary(bench.run(grid))["clients"][0]
        assert client["status"] == "dropped"
        assert "max-model-bytes = 1000: the run's model has " in client["reason"]

    # ----- the adapter ----------------------------------------------------------------------------

    def test_only_the_last_blocks_differ(self, plain: Uninterrupted) -> None:
        base, made = (
            AutoModelForCausalLM.from_pretrained(path)
            for path in (plain.bench.model, plain.folder / "model")
        )
        changed = {
            int(name.split(".")[2])
            for (name, one), (_, other) in zip(
                base.named_parameters(), made.named_parameters(), strict=True
            )
            if not torch.equal(one, other)
        }
        assert changed == {BLOCKS - 1}
        adapter = load_file(plain.folder / "adapter" / "adapter_model.safetensors")
        assert {name.split("layers.")[1].split(".")[0] for name in adapter} == {str(BLOCKS - 1)}
        assert any(value.abs().max() > 0 for name, value in adapter.items() if "lora_B" in name)

    def test_what_clients_send_is_the_adapter_alone(self, plain: Uninterrupted) -> None:
        replies = [read(reply.content) for _, reply in plain.received]
        sent = {key for reply in replies for key in reply.blobs}
        assert sent == {f"block-{BLOCKS - 2:04d}"}

    def test_traffic_equals_formula(self, plain: Uninterrupted) -> None:
        """A round transfers (2 L_A + p / r) u numbers.

        They are the adapter in both directions, and the emulator's LoRA if it was aligned.
        """
        u = sum(2 * (rows + columns) for rows, columns in ((64, 64), (32, 64), (64, 64)))

        def numbers(bodies: list[MessageBody]) -> int:
            blobs = [blob for body in bodies for blob in body.blobs.values()]
            return sum(value.numel() for blob in blobs for value in load(blob).values())

        clients = plain.bench.num_clients
        rounds = 2
        up = numbers([read(reply.content) for _, reply in plain.received])
        # In round 1 no adapter is sent, because clients make it from the seed.
        down = numbers(asked(plain.requests, "train"))
        # The server aligns before round 1 and round 2.
        emulator = numbers(asked(plain.requests, "emulator"))
        assert (up, down, emulator) == (
            clients * rounds * u,
            clients * (rounds - 1) * u,
            clients * 2 * u,
        )
        for body in (*asked(plain.requests, "train"), *asked(plain.requests, "emulator")):
            # A blob has a safetensors header and four bytes per number.
            for blob in body.blobs.values():
                assert len(blob) == 8 + int.from_bytes(blob[:8], "little") + 4 * u

    def test_alignment_has_current_adapter_in_both(
        self, bench: Bench, plain: Uninterrupted, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The start of the second alignment equals models made with transformers.

        The reference uses the tensors that clients received.
        """
        begun = []
        run = Alignment.run

        def noted(alignment: Alignment, teacher: Teacher, start: Tensors, adapter: Tensors) -> Any:
            done = run(alignment, teacher, start, adapter)
            begun.append((alignment, teacher, start, alignment.student.values()))
            return done

        monkeypatch.setattr(Alignment, "run", noted)
        report = summary(bench.run(bench.grid()))["report"]
        alignment, teacher, start, values = begun[1]
        brought = {
            key: load(blob) for key, blob in asked(plain.requests, "train")[-1].blobs.items()
        }
        assert list(brought) == [f"block-{BLOCKS - 2:04d}"]
        for key, tensors in brought.items():
            for name, tensor in tensors.items():
                torch.testing.assert_close(values[key][name].cpu(), tensor.float())
        (first,) = (
            {key: load(blob) for key, blob in body.blobs.items()}
            for body in _emulators(plain, 0)[:1]
        )
        for key, tensors in first.items():
            for name, tensor in tensors.items():
                torch.testing.assert_close(start[key][name].cpu(), tensor.float())
        ((full, smaller),) = report["groups"]
        assert alignment.places == Places({smaller: full + 1}, (BLOCKS - 3, BLOCKS - 2))
        model = AutoModelForCausalLM.from_pretrained(bench.model, dtype=torch.float32)
        states = list[torch.Tensor]()
        paths = {
            "attn.q": "self_attn.q_proj",
            "attn.v": "self_attn.v_proj",
            "mlp.down": "mlp.down_proj",
        }
        layer = model.model.layers[-1]
        samples = alignment.samples[list(teacher.numbers)]
        layer.register_forward_hook(
            lambda _, __, out: states.append(out if isinstance(out, torch.Tensor) else out[0])
        )
        (adapter,) = (
            {name: value.float() for name, value in tensors.items()} for tensors in brought.values()
        )
        samples = samples.cpu()
        with torch.no_grad():
            model(samples)
            for name, path in paths.items():
                weight = layer.get_submodule(path).weight
                weight.data = merged(adapter, weight.data, name)
            model(samples)
        without, with_adapter = states
        found = teacher.last.of_samples(range(len(samples))).float().cpu()
        assert (found - with_adapter).norm() < 0.1 * (found - without).norm()

    @pytest.mark.parametrize(
        "changes", [{"federation__wire_dtype": "bfloat16"}, {"federation__wire_dtype": "nf4"}]
    )
    def test_clients_train_on_aligned_sub_model(
        self, bench: Bench, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The client's emulator LoRA is close to what the server aligned, and not zero."""
        beside = list[Tensors]()
        make = client_app.methods.tuning.fedsoda._emulator

        def noted(*arguments: Any) -> Any:
            plan, values = make(*arguments)
            beside.append(values)
            return plan, values

        monkeypatch.setattr(client_app.methods.tuning.fedsoda, "_emulator", noted)
        aligned = list[dict[str, dict[str, torch.Tensor]]]()
        run = Alignment.run

        def kept(*arguments: Any) -> Any:
            done = run(*arguments)
            aligned.append(done[0])
            return done

        monkeypatch.setattr(Alignment, "run", kept)
        bench.run(bench.grid(**changes), federation__rounds=1, **changes)
        made = aligned[0]
        assert beside
        for values in beside:
            assert values.keys() == made.keys()
            for key, tensors in made.items():
                for name, tensor in tensors.items():
                    assert (values[key][name] - tensor).norm() < 0.2 * tensor.norm() + 1e-3
                    assert tensor.norm() > 0

    def test_realignment_continues_from_last_one(self, plain: Uninterrupted) -> None:
        first, second = (
            {key: load(blob) for key, blob in body.blobs.items()} for body in _emulators(plain, 0)
        )
        assert first.keys() == second.keys()
        differences = [
            np.abs((first[key][name] - second[key][name]).numpy()).max()
            for key in first
            for name in first[key]
        ]
        assert 0 < max(differences) < 0.1
        assert [body.fields["aligned"] for body in _emulators(plain, 0)] == [1, 2]

    # ----- other values of the same keys ----------------------------------------------------------

    @pytest.mark.parametrize(
        ("name", "changes", "adapted", "emulated"),
        [
            ("none", {"pre-align-steps": 0, "realign-every": 0}, {2}, set()),
            pytest.param("pre", {"realign-every": 0}, {2}, {0, 1}, marks=pytest.mark.slow),
            pytest.param(
                "realign",
                {"pre-align-steps": 0, "realign-every": 2},
                {2},
                {0, 1},
                marks=pytest.mark.slow,
            ),
            ("fedot", EVENLY | {"first-layers": 1, "realign-every": 0}, {0, 2}, {1}),
            ("fedbiot", EVENLY | {"realign-every": 1}, {2}, {0, 1}),
            ("stored", {"emulator": "stored"}, {2}, {0, 1}),
            pytest.param("first", {"first-layers": 1}, {0, 2}, {1}, marks=pytest.mark.slow),
            pytest.param("whole", {"group-layers": 0}, {3}, {0, 1, 2}, marks=pytest.mark.slow),
        ],
    )
    def test_variants(
        self,
        bench: Bench,
        name: str,
        changes: dict[str, Any],
        adapted: set[int],
        emulated: set[int],
    ) -> None:
        given = {f"fedsoda__{key.replace('-', '_')}": value for key, value in changes.items()}
        grid = bench.grid(**given)
        requests = list[Message]()
        grid.before_push = requests.append
        bench.run(grid, **given)
        sent = {
            int(key.removeprefix("block-"))
            for _, reply in grid.received
            for key in read(reply.content).blobs
        }
        brought = {block for body in asked(requests, "emulator") for block in body.fields["blocks"]}
        assert sent == adapted
        assert brought <= emulated
        assert bool(brought) == bool(emulated)
        rounds = [
            body.fields["aligned"]
            for body in asked(requests, "emulator")
            if body.header.client == 0
        ]
        assert rounds == {"none": [], "pre": [1], "realign": [2], "fedot": [1]}.get(name, [1, 2])

    def test_undropped_sub_model_is_the_full_model(self, bench: Bench) -> None:
        folder = bench.run(
            fedsoda__group_layers=0, fedsoda__emulator="stored", federation__rounds=1
        )
        assert open_model(str(folder / "sub-model")).sha256 == open_model(str(bench.model)).sha256

    def test_proximal_pull_keeps_adapters_near_start(self, bench: Bench) -> None:
        def size(**changes: Any) -> float:
            folder = bench.run(bench.grid(**changes), **changes)
            adapter = load_file(folder / "adapter" / "adapter_model.safetensors")
            return float(
                sum(value.square().sum() for name, value in adapter.items() if "lora_B" in name)
            )

        uniform = {"fedsoda__drop": "uniform", "training__steps": 6}
        far = size(training__proximal=0.0, **uniform)
        assert size(training__proximal=1.0, **uniform) < far

    # ----- settings that do not fit ---------------------------------------------------------------

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            (
                {"fedsoda__groups": 2},
                r"fedsoda.group-layers = 1, groups = 2: take 4 blocks, and the emulator has 3",
            ),
            (
                {"fedsoda__adapter_layers": 4},
                r"fedsoda.adapter-layers = 4, first-layers = 0: the model has 4 blocks",
            ),
            ({"fedsoda__public_text": "/nowhere.txt"}, r"/nowhere.txt(?s:.*)fedsoda.public-text"),
            (
                {"lora__layers": "0"},
                r"lora.layers = '0': fedsoda.adapter-layers says which blocks are adapted",
            ),
        ],
    )
    def test_incompatible_settings_are_refused_early(
        self, bench: Bench, changes: dict[str, Any], words: str
    ) -> None:
        with pytest.raises(EspalierError, match=words):
            bench.run(bench.grid(), **changes)
        assert not (bench.folder / "runs").exists()

    @pytest.mark.parametrize("copied", [False, True])
    def test_evaluation_text_is_no_alignment_text(self, bench: Bench, copied: bool) -> None:
        text = shutil.copy(bench.public, bench.folder / "copy.txt") if copied else bench.public
        with pytest.raises(EspalierError, match=r"evaluation.texts names the same text"):
            bench.run(bench.grid(), fedsoda__public_text=str(text))

    def test_alignment_interrupted_by_kill_restarts(
        self, bench: Bench, plain: Uninterrupted, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        backward = Loop._backward

        def killed_in_the_second(loop: Any, step: int) -> float:
            if (
                len(loop.model.model.layers) == BLOCKS - 1
                and loop.settings.steps == 2
                and loop.betas == (0.9, 0.95)
            ):
                raise Killed
            return backward(loop, step)

        with monkeypatch.context() as patched:
            patched.setattr(Loop, "_backward", killed_in_the_second)
            with pytest.raises(Killed):
                bench.run()
        (folder,) = bench.runs()
        assert json.loads((folder / "checkpoint" / "state.json").read_text())["round"] == 1
        resumed = bench.run(bench.grid(), resume_from=str(folder))
        assert model_files(resumed) == model_files(plain.folder)


def _zeros(blobs: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the same tensors filled with zeros."""
    return {
        key: pack_tensors(
            {name: np.zeros_like(value) for name, value in unpack_tensors(blob).items()}
        )
        for key, blob in blobs.items()
    }


def test_the_pull_is_towards_the_first_values(tmp_path: Path) -> None:
    """The pull is mu / 2 times the squared distance.

    The test moves a tensor that starts at zero and one that does not.
    """
    model = OpenedModel(save_tiny_llama(tmp_path / "base"))
    settings = parse({"method": "fedpetuning", "training.proximal": 0.5, "lora.rank": 2})
    plan = trained(model.plan, settings)
    first = initial_values(model, plan, settings.seed)
    pull = client_app.methods.tuning.fedsoda._Pull(SimpleNamespace(model=model, settings=settings))  # type: ignore[arg-type]
    assert float(pull(plan, first)) == 0
    moved = {
        key: {name: value.clone() for name, value in own.items()} for key, own in first.items()
    }
    moved["block-0000"]["attn.q.lora_a"][0, 0] += 3
    moved["block-0001"]["attn.v.lora_b"][1, 1] += 1
    assert float(pull(plan, moved)) == pytest.approx(0.25 * (9 + 1))


def _emulators(run: Uninterrupted, client: int) -> list[MessageBody]:
    return [body for body in asked(run.requests, "emulator") if body.header.client == client]
