"""FedSpine on encoders.

Devices cut heads and channels and evaluate their own models on items. The server averages the whole
classification head.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message
from safetensors.torch import load_file
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification, AutoTokenizer

from espalier.errors import EspalierError
from espalier.hf.opening.opened_model import OpenedModel
from espalier.messages.contract import check, check_reply
from espalier.messages.contracts import contract_for
from espalier.messages.records import read
from espalier.models.structure import Structure
from espalier.settings.run import parse
from tests.bench import LOCAL_ONLY, Bench, Home, home, results, summary
from tests.federation.tasks.task_runs import reviews, write
from tests.in_process import InProcessGrid
from tests.methods.tuning.adapters_sent import Sent, sent_adapters
from tests.tiny_model import save_tiny_roberta

HEAD = 3 * 16 * 65 + 16 * 64
CHANNEL = 65 + 64
"""Parameters of a prunable group, with biases.

The model has two blocks of width 64, each with 4 heads of width 16 and 64 channels.
"""
PATHS = {
    "attn.q": "attention.self.query", "attn.k": "attention.self.key",
    "attn.v": "attention.self.value", "attn.o": "attention.output.dense",
    "mlp.up": "intermediate.dense", "mlp.down": "output.dense",
}  # fmt: skip
HEAD_PATHS = {"head.dense": "classifier.dense", "head.out": "classifier.out_proj"}
SETTINGS: dict[str, Any] = {
    "federation.rounds": 3,
    # This value disables the limit, as in the paper.
    "federation.max-weight-ratio": 1e6,
    "federation.max-update-ratio": 1e6,
    "pruning.ratio": 0.4,
    "fedspine.allocation": "random",
    "pruning.keep-models": True,
    "training.steps": 3,
    "training.batch-size": 4,
    "training.learning-rate": 0.005,
    "lora.rank": 4,
    "lora.alpha": 8.0,
    "lora.targets": "all",
    "task.name": "sst2",
    "task.max-tokens": 40,
    "data.source": "files",
} | LOCAL_ONLY
TESTS = 40


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """Create the encoder of all runs.

    Its weights and biases are so large that removing any group changes the output.
    """
    folder = tmp_path_factory.mktemp("home")
    encoder = save_tiny_roberta(folder / "encoder")
    model = AutoModelForMaskedLM.from_pretrained(encoder)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.roberta.encoder.named_parameters():
        if "LayerNorm" not in name:
            torch.nn.init.normal_(parameter, std=0.2, generator=generator)
    model.save_pretrained(encoder)
    return Home(encoder, home(folder).public)


def bench_in(folder: Path, shared: Home, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Return a bench of four devices with one file of records each, and evaluation items."""
    monkeypatch.setenv("ESPALIER_STATE_DIR", str(folder / "state"))
    for name in ("client_text", "client_items"):
        monkeypatch.setattr(f"espalier.data.{name}.MIN_PREDICTIONS", 3)
    monkeypatch.setattr("espalier.data.client_items.MIN_ITEMS", 3)
    given = {
        "task.test-path": shared.public.with_name("test.jsonl"),
        "data.path": shared.public.with_name("text-{client}.txt"),
    }
    write(given["task.test-path"], reviews(99, TESTS))
    bench = Bench(
        folder, "fedspine", SETTINGS | {key: str(path) for key, path in given.items()}, home=shared
    )
    for client in range(bench.num_clients):
        # The node and the settings name the same file, in all runs.
        for own in (folder, given["data.path"].parent):
            write(own / f"text-{client}.txt", reviews(client))
    return bench


@pytest.fixture
def bench(tmp_path: Path, shared: Home, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return bench_in(tmp_path, shared, monkeypatch)


@dataclass(frozen=True, repr=False)
class Done:
    """Run that several tests read."""

    bench: Bench
    folder: Path
    grid: InProcessGrid
    requests: list[Message]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, shared: Home) -> Done:
    with pytest.MonkeyPatch.context() as monkeypatch:
        bench = bench_in(tmp_path_factory.mktemp("done"), shared, monkeypatch)
        requests = list[Message]()
        grid = bench.grid()
        grid.before_push = requests.append
        return Done(bench, bench.run(grid), grid, requests)


# ----- each device's own model --------------------------------------------------------------------


def structure_of(folder: Path, client: int) -> Structure:
    """Return a device's structure from the files of the run."""
    document = json.loads((folder / "structures" / f"client-{client:04d}.json").read_text())
    return Structure.from_json(document["structure"], "here")


@torch.no_grad()
def masked_model(run: Done, kept: Structure) -> Any:
    """Return transformers' full encoder with the tuned LoRA and head.

    Zeros replace the weights that read the outputs of cut groups.
    """
    model = AutoModelForSequenceClassification.from_pretrained(run.bench.model, num_labels=2).eval()
    tuned = load_file(run.folder / "adapter" / "adapter_model.safetensors")
    blocks = zip(model.roberta.encoder.layer, kept.blocks, strict=True)
    for index, (block, own) in enumerate(blocks):
        for path in PATHS.values():
            prefix = f"base_model.model.roberta.encoder.layer.{index}.{path}"
            block.get_submodule(path).weight += (
                2.0 * tuned[f"{prefix}.lora_B.weight"] @ tuned[f"{prefix}.lora_A.weight"]
            )
        for column in range(64):
            if column // 16 not in own.groups:
                block.attention.output.dense.weight[:, column] = 0
            if column not in own.channels:
                block.output.dense.weight[:, column] = 0
    for path in HEAD_PATHS.values():
        for kind in ("weight", "bias"):
            getattr(model.get_submodule(path), kind).copy_(tuned[f"base_model.model.{path}.{kind}"])
    return model


@torch.no_grad()
def scores_of(model: Any, directory: Path) -> tuple[float, float]:
    """Return accuracy and mean loss on the evaluation items, one item at a time."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    right = 0
    loss = 0.0
    for record in reviews(99, TESTS):
        logits = model(**tokenizer(record["sentence"], return_tensors="pt")).logits[0]
        right += int(logits.argmax()) == record["label"]
        loss -= float(logits.log_softmax(-1)[record["label"]])
    return right / TESTS, loss / TESTS


def test_device_figures_equal_masked_encoders(done: Done) -> None:
    document = summary(done.folder)
    found = list[tuple[float, float]]()
    for client, told in enumerate(document["clients"]):
        accuracy, loss = scores_of(
            masked_model(done, structure_of(done.folder, client)), done.bench.model
        )
        assert told["metrics"]["acc/sst2"] == pytest.approx(accuracy, abs=1e-3)
        assert told["metrics"]["loss/sst2"] == pytest.approx(loss, abs=1e-3)
        found.append((accuracy, loss))
    uncut = scores_of(
        masked_model(done, Structure.whole(OpenedModel(done.bench.model).plan)), done.bench.model
    )
    assert max(abs(loss - uncut[1]) for _, loss in found) > 0.01, (
        "units of this encoder should matter"
    )
    values = {
        entry["name"]: entry["values"]
        for entry in document["metrics"]
        if entry["dataset"] == "sst2"
    }
    assert [values["acc"]["federated"], values["loss"]["federated"]] == pytest.approx(
        np.mean(found, axis=0), abs=1e-3
    )
    assert values["loss"]["federated"] < values["loss"]["dense"]
    assert values["acc"]["local_baseline"] is None, "nobody trained alone"
    worst = {entry["name"]: entry["worst_of_clients"] for entry in document["metrics"]}
    assert worst["acc"] == {
        "federated": pytest.approx(min(accuracy for accuracy, _ in found), abs=1e-3)
    }
    assert worst["loss"] == {"federated": pytest.approx(max(loss for _, loss in found), abs=1e-3)}


def test_devices_have_own_cut_heads_and_channels(done: Done) -> None:
    """The structures have the reported pruning ratio, biases included, and differ by device."""
    kept = [structure_of(done.folder, client) for client in range(4)]
    assert len({structure.sha256 for structure in kept}) > 1
    for structure, told in zip(kept, summary(done.folder)["clients"], strict=True):
        gone = sum(
            HEAD * (4 - len(block.groups)) + CHANNEL * (64 - len(block.channels))
            for block in structure.blocks
        )
        assert told["metrics"]["pruned"] == pytest.approx(gone / (2 * (4 * HEAD + 64 * CHANNEL)))
        assert any(len(block.groups) < 4 or len(block.channels) < 64 for block in structure.blocks)


@torch.no_grad()
def test_device_models_are_written_with_heads(done: Done) -> None:
    whole = OpenedModel(done.bench.model).plan.num_parameters
    for client, told in enumerate(summary(done.folder)["clients"]):
        directory = done.folder / "clients" / told["site"]
        model = AutoModelForSequenceClassification.from_pretrained(directory).eval()
        rows = AutoTokenizer.from_pretrained(directory)(
            reviews(99)[0]["sentence"], return_tensors="pt"
        )
        torch.testing.assert_close(
            model(**rows).logits,
            masked_model(done, structure_of(done.folder, client))(**rows).logits,
            rtol=1e-4,
            atol=1e-4,
        )
        assert model.config.id2label == {0: "negative", 1: "positive"}
        gone = round(told["metrics"]["pruned"] * 2 * (4 * HEAD + 64 * CHANNEL))
        of_head = sum(
            value.numel()
            for name, value in model.named_parameters()
            if name.startswith("classifier")
        )
        assert model.num_parameters() - of_head == whole - gone
        assert (
            "AutoModelForSequenceClassification.from_pretrained"
            in (directory / "README.md").read_text()
        )


# ----- rounds -------------------------------------------------------------------------------------


def test_head_is_the_mean_of_device_heads(done: Done) -> None:
    """The head's weights are those of the adapters: the number of sequences."""
    sent: Sent = sent_adapters(done.grid, 3)
    reports = [read(reply.content) for _, reply in done.grid.received]
    weights = {
        body.header.client: body.fields["samples"]
        for body in reports
        if (body.header.kind, body.header.server_round) == ("train", 3)
    }
    written = load_file(done.folder / "adapter" / "adapter_model.safetensors")
    for name, path in HEAD_PATHS.items():
        for kind in ("weight", "bias"):
            total = sum(
                weights[client] * sent[client]["head"][f"{name}.{kind}"].double()
                for client in sorted(sent)
            )
            expected = total / sum(weights.values())
            torch.testing.assert_close(
                written[f"base_model.model.{path}.{kind}"].double(), expected, rtol=1e-6, atol=1e-8
            )


def test_every_message_matches_its_contract(done: Done) -> None:
    settings = parse(done.bench.config())
    plan = OpenedModel(done.bench.model).plan
    heads = set()
    for request, (_, reply) in zip(done.requests, done.grid.received, strict=True):
        asked = read(request.content)
        answer = read(reply.content)
        contract = contract_for(asked, lambda: plan, settings)
        check(asked, contract.down)
        check_reply(answer, asked, contract)
        heads |= {(asked.header.kind, "down") for _ in asked.blobs.keys() & {"head"}}
        heads |= {(asked.header.kind, "up") for _ in answer.blobs.keys() & {"head"}}
    assert {kind for kind, _ in heads} <= {"train", "fetch", "push"}
    assert {way for _, way in heads} == {"down", "up"}


@pytest.mark.slow
def test_same_seed_gives_same_bytes(bench: Bench, done: Done) -> None:
    grid = bench.grid()
    grid.held = {0: 9, 1: 3, 2: 6}
    for context in grid.contexts.values():
        context.node_config["keep-model"] = False
    again = bench.run(grid)
    assert results(again) == results(done.folder)
    assert summary(again) == summary(done.folder)


@pytest.mark.slow
def test_killed_and_resumed_equals_never_killed(bench: Bench, done: Done) -> None:
    folder = bench.killed(lambda header: (header.kind, header.server_round) == ("train", 3))
    assert results(bench.run(bench.grid(), resume_from=str(folder))) == results(done.folder)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(
            {
                "federation__wire_dtype": "nf4",
                "pruning__selection": "global",
                "federation__client_weights": "samples",
            },
            marks=pytest.mark.slow,
        ),
        {
            "federation__wire_dtype": "bfloat16",
            "training__base": "bfloat16",
            "evaluation__own_text": True,
        },
    ],
)
def test_other_ways_work(bench: Bench, changes: dict[str, Any]) -> None:
    document = summary(bench.run(federation__rounds=2, **changes))
    assert {client["status"] for client in document["clients"]} == {"completed"}


@pytest.mark.slow
def test_a_base_in_nf4_keeps_whole_blocks(bench: Bench) -> None:
    """At least one of 2 heads of width 64 stays, and 128 of 192 channels."""
    pytest.importorskip("bitsandbytes")
    model = save_tiny_roberta(bench.folder / "wide", hidden=128, heads=2, feed_forward=192)
    changes = {
        "model": str(model),
        "training__base": "nf4",
        "federation__rounds": 2,
        "fedspine__allocation": "fixed",
        "pruning__selection": "kind",
    }
    with pytest.raises(
        EspalierError, match=r"channel-multiple = 1: with training.base = 'nf4' .* set it to 64"
    ):
        bench.run(**changes)
    folder = bench.run(**changes, pruning__channel_multiple=64)
    for client in range(4):
        for block in structure_of(folder, client).blocks:
            assert (len(block.groups), len(block.channels)) == (1, 64)
    written = AutoModelForSequenceClassification.from_pretrained(folder / "clients" / "node-00000")
    assert written.roberta.encoder.layer[1].intermediate.dense.weight.shape == (64, 128)


# ----- settings that do not fit -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"task__name": "dolly"},
            "task.name = 'dolly': an encoder only classifies; choose sst2, mnli, boolq or class",
        ),
        (
            {"lora__targets": "attn.q,attn.v"},
            "measures channels by adapters that lie on them, and block 0 has none on mlp.up",
        ),
        ({"pruning__ratio": 0.9}, r"pruning.ratio = 0.9"),
        (
            {"training__base": "nf4"},
            r"channel-multiple = 1: with training.base = 'nf4' .* set it to 64",
        ),
        (
            {"training__base": "nf4", "pruning__channel_multiple": 64},
            "a group of attention has 16 features in attn.o, no multiple of 64",
        ),
    ],
)
def test_incompatible_settings_are_refused_early(
    bench: Bench, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(EspalierError, match=words):
        bench.run(**changes)
    assert not (bench.folder / "runs").exists()
