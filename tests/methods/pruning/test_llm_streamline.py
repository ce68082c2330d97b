"""LLM-Streamline: promises of every method, and its steps compared with transformers and AdamW."""

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message
from torch import Tensor
from transformers import AutoModelForCausalLM

from espalier.hf.opening.opened_model import OpenedModel
from espalier.messages.message import Header, MessageBody
from espalier.messages.records import read
from espalier.messages.tensor_blobs import unpack_tensors
from espalier.seeds import derive_seed
from espalier.training.sequences import sequences_of_step
from tests.bench import Bench, results, summary
from tests.methods.promises.federations import Uninterrupted
from tests.methods.promises.promises import Promises
from tests.methods.pruning.llm_streamline_runs import BLOCKS, RATE, STEPS, LlmStreamlineRuns
from tests.methods.pruning.test_flap import all_samples

SPAN = 2
PATHS = {
    "attn.q": "self_attn.q_proj", "attn.k": "self_attn.k_proj", "attn.v": "self_attn.v_proj",
    "attn.o": "self_attn.o_proj", "mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj", "norm.attn": "input_layernorm",
    "norm.mlp": "post_attention_layernorm",
}  # fmt: skip
NAMES = {f"{name}.weight": f"{path}.weight" for name, path in PATHS.items()}


def dense(bench: Bench) -> Any:
    return AutoModelForCausalLM.from_pretrained(bench.model, dtype=torch.float32).eval()


def hidden_states(bench: Bench, samples: Tensor) -> list[Tensor]:
    """Return the input of each block and the output of the last one before the final norm."""
    model = dense(bench)
    found = list[Tensor]()
    for block in model.model.layers:
        block.register_forward_pre_hook(lambda _, args: found.append(args[0]))
    model.model.layers[-1].register_forward_hook(lambda _, args, output: found.append(output))
    with torch.no_grad():
        model(input_ids=samples, use_cache=False)
    return found


def published_hidden_states(bench: Bench, samples: Tensor) -> list[Tensor]:
    """Return transformers' hidden states, as the published code compares them.

    The last one is the output of the final norm.
    """
    with torch.no_grad():
        return list(
            dense(bench)(
                input_ids=samples, output_hidden_states=True, use_cache=False
            ).hidden_states
        )


def cosines_by_hand(hidden: list[Tensor]) -> list[float]:
    """Return the mean cosine of each span, computed token by token."""
    found = []
    for start in range(BLOCKS - SPAN + 1):
        pairs = zip(
            hidden[start].flatten(0, 1).double(),
            hidden[start + SPAN].flatten(0, 1).double(),
            strict=True,
        )
        own = [float(one @ other / one.norm() / other.norm()) for one, other in pairs]
        found.append(sum(own) / len(own))
    return found


def trained_by_hand(
    bench: Bench,
    layer: dict[str, Tensor],
    start: int,
    samples: Tensor,
    client: int,
    first_step: int,
) -> dict[str, Tensor]:
    """Train one block for a round with AdamW, inside a whole transformers model.

    Its inputs and targets are hidden states.
    """
    hidden = hidden_states(bench, samples)
    model = dense(bench)
    block = model.model.layers[start]
    block.load_state_dict({NAMES[name]: value.clone() for name, value in layer.items()})
    optimizer = torch.optim.AdamW(block.parameters(), lr=RATE, weight_decay=1e-3)
    rotary = model.model.rotary_emb(hidden[0], torch.arange(16)[None])
    for step in range(first_step, first_step + STEPS):
        numbers = sequences_of_step(
            len(samples), 2, step, derive_seed(0, "training", client=client)
        )
        losses = []
        for number in numbers:
            made = block(hidden[start][number : number + 1], position_embeddings=rotary)
            losses.append((made - hidden[start + SPAN][number : number + 1]).square().mean())
        optimizer.zero_grad()
        (sum(losses) / len(losses)).backward()
        torch.nn.utils.clip_grad_norm_(block.parameters(), 1.0)
        # Half a cosine over the steps of both rounds.
        optimizer.param_groups[0]["lr"] = RATE * (1 + math.cos(math.pi * step / (2 * STEPS))) / 2
        optimizer.step()
    return {name: block.get_parameter(path).detach() for name, path in NAMES.items()}


def sent(received: list[tuple[int, Message]], server_round: int, client: int) -> dict[str, Tensor]:
    """Return the tensors that a client sent in a round, by name."""
    found = {}
    for partition, reply in received:
        body = read(reply.content)
        if (
            partition == client
            and body.header.server_round == server_round
            and body.header.kind in ("train", "fetch")
        ):
            for blob in body.blobs.values():
                found |= {
                    name: torch.from_numpy(value.copy())
                    for name, value in unpack_tensors(blob).items()
                }
    return found


class TestLlmStreamline(LlmStreamlineRuns, Promises):
    def other_orders(self, order: MessageBody) -> list[MessageBody]:
        """Return orders with another span of blocks, or with other tensors."""
        if "start" not in order.fields:
            return []
        return [
            *super().other_orders(order),
            MessageBody(order.header, {"start": (order.fields["start"] + 1) % 3}, order.blobs),
        ]

    @pytest.fixture
    def pointed(self, bench: Bench) -> Bench:
        """Let the centralized baseline find the clients' texts too."""
        bench.settings = bench.settings | {
            "data.source": "files",
            "data.path": f"{bench.folder}/text-{{client}}.txt",
        }
        return bench

    def samples(self, bench: Bench) -> tuple[Tensor, ...]:
        changes = {"data__source": "files", "data__path": f"{bench.folder}/text-{{client}}.txt"}
        return all_samples(bench, **changes).chunk(bench.num_clients)

    def test_least_changing_stretch_is_removed(self, plain: Uninterrupted) -> None:
        samples = self.samples(plain.bench)
        for client, own in enumerate(samples):
            cosines = sent(plain.received, 1, client)["cosines"]
            np.testing.assert_allclose(
                cosines,
                cosines_by_hand(published_hidden_states(plain.bench, own)),
                rtol=1e-4,
                atol=1e-5,
            )
        pooled = cosines_by_hand(published_hidden_states(plain.bench, torch.cat(samples)))
        report = summary(plain.folder)["report"]
        np.testing.assert_allclose(report["cosines"], pooled, rtol=1e-4, atol=1e-5)
        start = int(np.argmax(pooled))
        assert report["removed_blocks"] == [start, start + 1]

    def test_last_block_is_comparable_before_norm(self, pointed: Bench) -> None:
        """The setting holds for clients, local baselines and the centralized baseline.

        The last block of the model adds almost nothing.
        """
        model = dense(pointed)
        home_model = pointed.model
        with torch.no_grad():
            for path in ("self_attn.o_proj", "mlp.down_proj"):
                model.model.layers[-1].get_parameter(f"{path}.weight").mul_(1e-3)
            model.model.norm.weight.copy_(torch.tensor([1.0, -1.0]).repeat(8))
        pointed.model = pointed.folder / "model"
        shutil.copytree(home_model, pointed.model)
        model.save_pretrained(pointed.model)
        changes = {
            "llm_streamline__replacement": "none",
            "federation__rounds": 0,
            "evaluation__centralized": "auto",
        }
        unread = {
            f"llm_streamline__{key}": None for key in ("steps", "batch_samples", "learning_rate")
        }
        pointed.settings = {
            k: v
            for k, v in pointed.settings.items()
            if k.replace("-", "_").replace(".", "__") not in unread
        }
        for value, went in (("after-norm", False), ("before-norm", True)):
            folder = pointed.run(
                **changes, llm_streamline__last_hidden_state=value, evaluation__local_baseline=True
            )
            document = summary(folder)
            assert (document["report"]["removed_blocks"] == [BLOCKS - 1]) is went
            values = document["metrics"][0]["values"]
            assert values["centralized"] == pytest.approx(values["federated"], rel=1e-6)

    def test_training_equals_plain_loop_and_average(self, plain: Uninterrupted) -> None:
        bench = plain.bench
        samples = self.samples(plain.bench)
        start, *_ = summary(plain.folder)["report"]["removed_blocks"]
        base = dense(bench).model.layers[start]
        layer = {name: base.get_parameter(path).detach() for name, path in NAMES.items()}
        for server_round in (2, 3):
            own = [sent(plain.received, server_round, client) for client in range(4)]
            for client, found in enumerate(own):
                expected = trained_by_hand(
                    bench, layer, start, samples[client], client, (server_round - 2) * STEPS
                )
                assert found.keys() == expected.keys()
                for name, value in expected.items():
                    torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4)
            layer = {
                name: torch.stack([found[name] for found in own]).mean(dim=0) for name in layer
            }
        written = AutoModelForCausalLM.from_pretrained(
            plain.folder / "model", dtype=torch.float32
        ).model.layers
        assert len(written) == BLOCKS - 1
        for name, value in layer.items():
            torch.testing.assert_close(
                written[start].get_parameter(NAMES[name]), value.bfloat16().float()
            )
        untouched = [index for index in range(BLOCKS) if index not in (start, start + 1)]
        for index, source in zip(
            [index for index in range(BLOCKS - 1) if index != start], untouched, strict=True
        ):
            before = dense(bench).model.layers[source].state_dict()
            assert all(
                torch.equal(value, before[name])
                for name, value in written[index].state_dict().items()
            )

    def test_the_report_counts_what_the_files_hold(self, plain: Uninterrupted) -> None:
        report = summary(plain.folder)["report"]
        model = AutoModelForCausalLM.from_pretrained(plain.folder / "model")
        assert report["form"] == "plain"
        assert report["parameters"] == sum(value.numel() for value in model.parameters())
        assert report["trained_parameters"] == 16 * 16 * 2 + 8 * 16 * 2 + 3 * 24 * 16 + 2 * 16

    def test_nothing_comes_in_their_place(self, pointed: Bench) -> None:
        """A round without training is compared with the centralized and the local baselines."""
        changes = {
            "llm_streamline__replacement": "none",
            "federation__rounds": 0,
            "evaluation__own_text": True,
        }
        changes |= {
            "evaluation__local_baseline": True,
            "evaluation__centralized": "auto",
            "pruning__form": "zero-filled",
        }
        unread = {
            f"llm_streamline__{key}": None for key in ("steps", "batch_samples", "learning_rate")
        }
        pointed.settings = {
            k: v
            for k, v in pointed.settings.items()
            if k.replace("-", "_").replace(".", "__") not in unread
        }
        folder = pointed.run(**changes)
        document = summary(folder)
        (went,) = document["report"]["removed_blocks"]
        assert document["report"]["form"] == "zero-filled"
        model = dense(pointed)
        del model.model.layers[went]
        written = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
        tokens = torch.arange(12)[None]
        with torch.no_grad():
            for index, block in enumerate(model.model.layers):
                block.self_attn.layer_idx = index
            torch.testing.assert_close(
                written(tokens, use_cache=False).logits, model(tokens, use_cache=False).logits
            )
        public, own = document["metrics"]
        assert public["values"]["centralized"] == pytest.approx(
            public["values"]["federated"], rel=1e-6
        )
        assert {client["status"] for client in document["clients"]} == {"completed"}
        assert own["values"]["local_baseline"] is not None

    def test_lost_hidden_states_are_recomputed(self, bench: Bench, plain: Uninterrupted) -> None:
        def lose(message: Message) -> None:
            header: Header = read(message.content).header
            if (header.kind, header.server_round, header.client) == ("train", 3, 1):
                for file in (bench.folder / "state" / header.lineage / "node-00001").rglob(
                    "stretch.json"
                ):
                    file.unlink()
                    lost.append(file)

        lost: list[Path] = []
        grid = bench.grid()
        grid.before_push = lose
        assert results(bench.run(grid)) == results(plain.folder)
        assert len(lost) == 1

    @pytest.mark.parametrize("wire_dtype", ["bfloat16", "nf4"])
    def test_rounded_layers_come_close_to_whole_ones(
        self, bench: Bench, plain: Uninterrupted, wire_dtype: str
    ) -> None:
        grid = bench.grid(federation__wire_dtype=wire_dtype)
        folder = bench.run(grid, federation__wire_dtype=wire_dtype, evaluation__own_text=True)
        start, *_ = summary(folder)["report"]["removed_blocks"]
        made, exact = (OpenedModel(path / "model").checkpoint for path in (folder, plain.folder))
        base = OpenedModel(bench.model).checkpoint
        for path in NAMES.values():
            name = f"model.layers.{start}.{path}"
            change = (exact.read(name).float() - base.read(name).float()).norm()
            error = (made.read(name).float() - exact.read(name).float()).norm()
            assert error < (0.05 if wire_dtype == "bfloat16" else 0.5) * change

    def test_weights_by_samples_are_those_of_windows(
        self, bench: Bench, plain: Uninterrupted
    ) -> None:
        """All clients have equally many samples, so the mean is that of equal weights."""
        clients = summary(plain.folder)["clients"]
        assert [client["metrics"]["samples"] for client in clients] == [2, 2, 2, 2]
        equal = bench.run(
            bench.grid(federation__client_weights="equal"), federation__client_weights="equal"
        )
        assert {k: v for k, v in results(equal).items() if k.endswith(".safetensors")} == {
            k: v for k, v in results(plain.folder).items() if k.endswith(".safetensors")
        }
