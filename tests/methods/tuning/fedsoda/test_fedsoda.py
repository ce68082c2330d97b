"""FedSODA: promises of every method, and the adapter.

The adapter of the sub-model fits the full model.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load, load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import client_app.methods.tuning.fedsoda
from espalier.hf.opening.opened_model import OpenedModel
from espalier.messages.message import MessageBody
from espalier.messages.records import read
from espalier.models.adapters import Tensors
from espalier.training.alignment import Alignment, Places, Teacher
from tests.bench import Bench, private_text, summary
from tests.methods.promises.federations import Uninterrupted
from tests.methods.promises.promises import Promises, held_out
from tests.methods.tuning.fedsoda.fedsoda_runs import BLOCKS, FedSodaRuns, asked

SCALING = 2.0


def merged(tensors: Mapping[str, torch.Tensor], weight: torch.Tensor, name: str) -> torch.Tensor:
    """Return a weight plus its adapter's update, by the definition."""
    return weight + SCALING * tensors[f"{name}.lora_b"] @ tensors[f"{name}.lora_a"]


class TestFedSoda(FedSodaRuns, Promises):
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
        adapter = [body for body in asked(whole.requests, "push") if body.header.server_round == 3][
            -1
        ]
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


def _emulators(run: Uninterrupted, client: int) -> list[MessageBody]:
    return [body for body in asked(run.requests, "emulator") if body.header.client == client]
