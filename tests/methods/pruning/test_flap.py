"""FLAP: promises of every method, and its arithmetic compared with slow procedures."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from flwr.app import Array, Message
from transformers import AutoModelForCausalLM, AutoTokenizer

from espalier.data.client_text import client_samples
from espalier.errors import EspalierError
from espalier.hf.opening.opened_model import OpenedModel
from espalier.messages.message import MessageBody
from espalier.messages.records import STYPE, read
from espalier.messages.tensor_blobs import pack_tensors, unpack_tensors
from espalier.settings.node import simulated_node
from espalier.settings.run import parse
from espalier.storage.blobs import sha256
from pruning_kernels.fixed_point import from_words, to_words
from strategies.base.rounds import RunFailed
from tests.bench import Bench, private_text, summary
from tests.methods.promises.federations import Uninterrupted
from tests.methods.promises.promises import Promises

SHARE = 0.3
LINEARS = {"attn.o": "self_attn.o_proj", "mlp.down": "mlp.down_proj"}


def inputs_of(bench: Bench, samples: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    """Return the inputs of two matrices of each dense block, shape (tokens, channels), float64."""
    model = AutoModelForCausalLM.from_pretrained(bench.model, dtype=torch.float32).eval()
    found: list[dict[str, torch.Tensor]] = []
    for block in model.model.layers:
        own: dict[str, torch.Tensor] = {}
        found.append(own)
        for name, path in LINEARS.items():

            def keep(
                _: Any,
                inputs: tuple[torch.Tensor],
                own: dict[str, torch.Tensor] = own,
                name: str = name,
            ) -> None:
                own[name] = inputs[0].flatten(0, -2).double()

            block.get_submodule(path).register_forward_pre_hook(keep)
    with torch.no_grad():
        model(input_ids=samples, use_cache=False)
    return found


def cut_by_hand(bench: Bench, inputs: list[dict[str, torch.Tensor]]) -> list[dict[str, list[int]]]:
    """Return the groups that the published steps prune.

    An attention group of two heads of width 4 costs 768 parameters, a channel 48. All groups
    compete.
    """
    model = AutoModelForCausalLM.from_pretrained(bench.model, dtype=torch.float32)
    units: list[tuple[float, int, str, int, int]] = []
    for index, block in enumerate(model.model.layers):
        for name, path in LINEARS.items():
            weight = block.get_submodule(path).weight.double()
            scores = inputs[index][name].var(dim=0) * weight.square().sum(dim=0)
            scores = scores.square() if name == "attn.o" else scores
            scores = (scores - scores.mean()) / scores.std()
            if name == "attn.o":
                units += [
                    (float(scores[8 * g : 8 * g + 8].mean()), index, "groups", g, 16 * 16 + 16 * 8)
                    for g in range(2)
                ]
            else:
                units += [(float(scores[c]), index, "channels", c, 48) for c in range(24)]
    target = SHARE * sum(cost for *_, cost in units)
    spent = 0
    cut: list[dict[str, list[int]]] = [{"groups": [], "channels": []} for _ in range(2)]
    for _, index, kind, unit, cost in sorted(units):
        if spent < target and len(cut[index][kind]) + 1 < {"groups": 2, "channels": 24}[kind]:
            cut[index][kind].append(unit)
            spent += cost
    return [{kind: sorted(numbers) for kind, numbers in block.items()} for block in cut]


def all_samples(bench: Bench, **changes: Any) -> torch.Tensor:
    settings = parse(bench.config(**changes))
    tokenizer = AutoTokenizer.from_pretrained(bench.model)
    encode = lambda text: tokenizer(text)["input_ids"]  # noqa: E731
    return torch.cat(
        [
            client_samples(settings, simulated_node(), encode, client)
            for client in range(bench.num_clients)
        ]
    )


def change_blobs(
    reply: Message, change: Callable[[str, np.ndarray], np.ndarray], only: str = ""
) -> None:
    """Replace the tensors of a reply's blobs, whose hashes are those of all its blobs."""
    blobs = reply.content["blobs"]
    hashes = list(reply.content["fields"]["blob_sha256"])
    for place, key in enumerate(sorted(blobs)):
        if only in key:
            found = {n: change(n, v) for n, v in unpack_tensors(blobs[key].data).items()}
            blobs[key] = Array("", (), STYPE, pack_tensors(found))
            hashes[place] = sha256(blobs[key].data)
    reply.content["fields"]["blob_sha256"] = hashes


def kept_units(folder: Path) -> list[dict[str, Any]]:
    document = json.loads((folder / "model" / "structure.json").read_text())
    return [{kind: block[kind] for kind in ("groups", "channels")} for block in document["blocks"]]


class TestFlap(Promises):
    """Federations with one round in which all groups compete."""

    method = "flap"
    settings: ClassVar[dict[str, Any]] = {"pruning.ratio": SHARE}
    last_round = 1
    cuts_samples = "calibration_samples"

    @pytest.fixture
    def pointed(self, bench: Bench) -> Bench:
        """Let the centralized baseline find the clients' texts too."""
        bench.settings = bench.settings | {
            "data.source": "files",
            "data.path": f"{bench.folder}/text-{{client}}.txt",
        }
        return bench

    def other_orders(self, order: MessageBody) -> list[MessageBody]:
        """Return no orders: an order of FLAP has no content that could differ."""
        return []

    def test_cut_equals_one_party_with_all_windows(self, pointed: Bench) -> None:
        folder = pointed.run(evaluation__centralized="auto")
        inputs = inputs_of(pointed, all_samples(pointed))
        expected = cut_by_hand(pointed, inputs)
        assert sum(len(block["channels"]) for block in expected) > 4
        found = OpenedModel(folder / "model")
        assert found.structure is not None
        for block, cut in zip(found.structure.blocks, expected, strict=True):
            assert [unit for unit in range(2) if unit not in block.groups] == cut["groups"]
            assert [unit for unit in range(24) if unit not in block.channels] == cut["channels"]
        base = OpenedModel(pointed.model)
        for index, cut in enumerate(expected):
            for name, columns in (
                ("attn.o", [8 * g + at for g in cut["groups"] for at in range(8)]),
                ("mlp.down", cut["channels"]),
            ):
                linear = base.plan.blocks[index].linear(name)
                weight = base.checkpoint.read(linear.parameter).double()
                mean = inputs[index][name].mean(dim=0)
                bias = found.checkpoint.read(linear.parameter.replace("weight", "bias"))
                wanted = weight[:, columns] @ mean[columns]
                # The tolerance is that of the file's bfloat16.
                torch.testing.assert_close(bias.double(), wanted, rtol=1e-2, atol=1e-3)
        (metric,) = summary(folder)["metrics"]
        assert metric["values"]["centralized"] == pytest.approx(
            metric["values"]["federated"], rel=1e-3
        )

    def test_the_report_and_the_files_agree(self, plain: Uninterrupted) -> None:
        document = summary(plain.folder)
        small = OpenedModel(plain.folder / "model")
        base = OpenedModel(plain.bench.model)
        built = AutoModelForCausalLM.from_pretrained(plain.folder / "model", trust_remote_code=True)
        counted = sum(parameter.numel() for parameter in built.parameters())
        report = document["report"]
        assert report["parameters"] == small.plan.num_parameters == counted
        assert report["remaining_fraction"] == pytest.approx(counted / base.plan.num_parameters)
        assert report["form"] == "compact"
        cut = 1 - small.plan.num_weights / base.plan.num_weights
        assert document["sparsity"]["achieved"] == pytest.approx(cut)
        assert SHARE <= cut < SHARE + 768 / base.plan.num_weights
        assert report["groups_of_blocks"] == [
            {kind: len(getattr(block, kind)) for kind in ("groups", "channels")}
            for block in small.structure.blocks  # type: ignore[union-attr]
        ]

    def test_client_moments_are_those_of_its_windows(self, plain: Uninterrupted) -> None:
        changes = {
            "data__source": "files",
            "data__path": f"{plain.bench.folder}/text-{{client}}.txt",
        }
        samples = all_samples(plain.bench, **changes).chunk(4)
        found = set[tuple[int, str]]()
        for client, reply in plain.received:
            body = read(reply.content)
            if body.header.kind == "train":
                assert body.fields.keys() == {"seconds", "blob_sha256"}
            for key, blob in body.blobs.items():
                found.add((client, key))
                sent = unpack_tensors(blob)
                assert sent["count"].tolist() == [32]
                inputs = inputs_of(plain.bench, samples[client])[int(key.removeprefix("block-"))]
                for name, values in inputs.items():
                    sums = {"sums": values.sum(dim=0), "squares": values.square().sum(dim=0)}
                    for kind, expected in sums.items():
                        numbers = from_words(sent[f"{name}.{kind}"], 56)
                        np.testing.assert_allclose(numbers, expected, rtol=1e-4, atol=1e-6)
        assert len(found) == 4 * 2

    @pytest.mark.parametrize(
        ("changes", "alike"),
        [
            ({"pruning__selection": "kind"}, True),
            ({"pruning__selection": "block"}, False),
        ],
    )
    def test_other_choices(self, bench: Bench, changes: dict[str, Any], alike: bool) -> None:
        blocks = summary(bench.run(**changes))["report"]["groups_of_blocks"]
        assert (blocks[0] == blocks[1]) == alike

    @pytest.mark.parametrize(
        ("changes", "form"),
        [
            ({"pruning__selection": "kind", "flap__bias_compensation": False}, "plain"),
            ({"pruning__selection": "kind"}, "plain"),
            ({"pruning__form": "zero-filled"}, "zero-filled"),
            (
                {
                    "pruning__form": "compact",
                    "pruning__selection": "kind",
                    "flap__bias_compensation": False,
                },
                "compact",
            ),
        ],
    )
    def test_forms(self, bench: Bench, changes: dict[str, Any], form: str) -> None:
        folder = bench.run(**changes)
        assert summary(folder)["report"]["form"] == form
        assert (folder / "model" / "structure.json").exists() == (form == "compact")
        assert not list((folder / "model").glob("*.py"))
        assert "auto_map" not in (folder / "model" / "config.json").read_text()

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            (
                {"pruning__ratio": 0.99},
                (
                    r"pruning.ratio = 0.99: 99.0% of what can be removed would"
                    r" be removed"
                ),
            ),
            (
                {"pruning__form": "plain"},
                "pruning.form = 'plain': .*to 'kind', with which they stay alike",
            ),
            (
                {"pruning__form": "plain", "pruning__selection": "block"},
                "pruning.form = 'plain': .*set pruning.selection to 'kind'",
            ),
        ],
    )
    def test_impossible_cuts_are_refused_early(
        self, bench: Bench, changes: dict[str, Any], words: str
    ) -> None:
        with pytest.raises(EspalierError, match=words):
            bench.run(**changes)
        assert not (bench.folder / "runs").exists()

    @pytest.mark.parametrize("spoilt", ["negative", "large", "beyond", "no tokens"])
    def test_impossible_moments_drop_their_sender(self, bench: Bench, spoilt: str) -> None:
        def spoil(request: Message, reply: Message) -> Message:
            if read(request.content).header.kind == "train":
                tensors = unpack_tensors(reply.content["blobs"]["block-0000"].data)
                squares = tensors["mlp.down.squares"]
                if spoilt == "negative":
                    squares[1, 3] = 2**64 - 1
                elif spoilt == "large":
                    # The square of a sum exceeds what the sum of squares allows.
                    tensors["mlp.down.sums"][1, 3] = 2**24
                elif spoilt == "beyond":
                    squares[1, 3] = 2**47
                else:
                    tensors["count"][0] = 0
                reply.content["blobs"]["block-0000"] = Array("", (), STYPE, pack_tensors(tensors))
            return reply

        grid = bench.grid()
        grid.tamper[1] = spoil
        clients = summary(bench.run(grid))["clients"]
        assert [client["status"] for client in clients] == [
            "completed",
            "dropped",
            "completed",
            "completed",
        ]
        words = "sums are out of range, or contradict the sums of squares"
        assert ("is not between 1 and" if spoilt == "no tokens" else words) in clients[1]["reason"]

    def test_more_tokens_than_requested_are_refused(self, bench: Bench) -> None:
        def claim(request: Message, reply: Message) -> Message:
            if read(request.content).header.kind == "train":
                change_blobs(
                    reply, lambda name, value: value * 0 + 16_000_001 if name == "count" else value
                )
            return reply

        grid = bench.grid()
        grid.tamper = dict.fromkeys((0, 1, 2), claim)
        with pytest.raises(RunFailed, match="16000001 is not between 1 and 16000000 tokens"):
            bench.run(grid)

    def test_blocks_of_different_tokens_drop_their_sender(self, bench: Bench) -> None:
        def claim(request: Message, reply: Message) -> Message:
            if read(request.content).header.kind == "train":
                change_blobs(
                    reply,
                    lambda name, value: value + np.uint64(1) if name == "count" else value,
                    only="block-0001",
                )
            return reply

        grid = bench.grid(part_bytes=10**7)
        grid.tamper[1] = claim
        client = summary(bench.run(grid, part_bytes=10**7))["clients"][1]
        assert "its blocks have different numbers of tokens" in client["reason"]

    @pytest.mark.parametrize("claimed", ["tokens", "inputs"])
    def test_one_client_is_capped_by_median(self, bench: Bench, claimed: str) -> None:
        """The limit applies to claimed tokens and to moments far above those of other clients."""

        def shout(request: Message, reply: Message) -> Message:
            def louder(name: str, value: np.ndarray) -> np.ndarray:
                if name == "count":
                    return value * 0 + 1_000_000 if claimed == "tokens" else value
                if claimed == "tokens":
                    return value
                factor = 1e4 if name.endswith("sums") else 1e8
                return to_words(from_words(value, 56) * factor, 56)

            if read(request.content).header.kind == "train":
                change_blobs(reply, louder)
            return reply

        grid = bench.grid(part_bytes=10**7)
        grid.tamper[1] = shout
        client = summary(bench.run(grid, part_bytes=10**7))["clients"][1]
        assert client["status"] == "completed"
        assert client["capped"][claimed]["claimed"] > 100 * client["capped"][claimed]["counted"]


@pytest.mark.parametrize("method", ["flap", "llm-streamline"])
def test_site_with_more_windows_takes_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setenv("ESPALIER_STATE_DIR", str(tmp_path / "state"))
    settings = (
        {"federation.rounds": 1, "llm-streamline.steps": 1} if method == "llm-streamline" else {}
    )
    bench = Bench(tmp_path, method, settings)
    grid = bench.grid()
    next(iter(grid.contexts.values())).node_config["num-samples"] = 3
    assert {client["status"] for client in summary(bench.run(grid))["clients"]} == {"completed"}


def test_texts_of_the_bench_differ() -> None:
    """Pooled moments would otherwise equal those of one client."""
    assert len({private_text(client) for client in range(4)}) == 4
