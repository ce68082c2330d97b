"""Iterative FedPrLLM: promises of every method, and blocks that are decided one by one."""

import json
import shutil
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from flwr.app import Message
from safetensors import safe_open
from safetensors.numpy import load
from transformers import AutoModelForCausalLM

from espalier.data.client_text import client_samples
from espalier.hf.opening.opened_model import OpenedModel
from espalier.messages.message import failure
from espalier.messages.records import read, write
from espalier.settings.node import parse_node
from espalier.settings.run import parse
from tests.bench import Bench, events, model_files, results, summary
from tests.methods.promises.federations import Uninterrupted, third_order_of
from tests.methods.promises.promises import PruningPromises
from tests.methods.pruning.test_fedprllm import votes_of
from tests.tiny_model import save_tiny_llama


class TestIterativeFedPrLLM(PruningPromises):
    method = "fedprllm"
    settings: ClassVar[dict[str, Any]] = {
        "pruning.sparsity": 0.5,
        "pruning.strategy": "iterative",
    }
    last_round = 1

    def expected_sparsity(self, model: OpenedModel) -> float:
        shapes = [linear.shape for block in model.plan.blocks for linear in block.linears]
        return sum(int(rows * columns * 0.5) for rows, columns in shapes) / sum(
            rows * columns for rows, columns in shapes
        )

    @pytest.mark.parametrize(
        "changes",
        [
            {},
            {"fedprllm__weight_scaling": True},
            {"fedprllm__weight_scaling": True, "fedprllm__continue_behind": "scaled"},
        ],
        ids=["masked", "masked-then-scaled", "scaled"],
    )
    def test_masks_equal_those_of_whole_models(self, bench: Bench, changes: dict[str, Any]) -> None:
        """All clients vote on a dense block that follows the globally pruned blocks.

        The published code scales a block before the clients run it. Step 7 of the paper does not
        mention this.
        """
        folder = bench.run(**changes)
        run = parse(bench.config())
        opened = OpenedModel(bench.model)
        model = AutoModelForCausalLM.from_pretrained(bench.model, dtype=torch.float32)
        samples = [
            client_samples(
                run,
                parse_node(context.node_config, simulated=True),
                opened.encode,
                context.node_config["partition-id"],
            )
            for context in bench.grid().contexts.values()
        ]
        with safe_open(folder / "masks.safetensors", "np") as masks, torch.no_grad():
            for block in opened.plan.blocks:
                modules = {
                    linear.parameter: model.get_submodule(linear.parameter.removesuffix(".weight"))
                    for linear in block.linears
                }
                votes = {
                    name: torch.zeros(module.weight.shape, dtype=torch.int64)
                    for name, module in modules.items()
                }
                for own in samples:
                    for name, norm in input_norms(model, modules, own).items():
                        votes[name] += lowest_half_of_each_row(modules[name].weight.abs() * norm)
                for name, module in modules.items():
                    expected = most_voted_half(
                        votes[name], opened.checkpoint.read(name).float().abs()
                    )
                    words = masks.get_tensor(name)
                    assert {
                        i
                        for i in range(module.weight.numel())
                        if int(words[i // 64]) >> (i % 64) & 1
                    } == expected
                    module.weight.view(-1)[sorted(expected)] = 0
                    if "fedprllm__continue_behind" in changes:
                        for row, column in np.ndindex(*module.weight.shape):
                            scaled = (
                                float(module.weight[row, column])
                                * (4 - int(votes[name][row, column]))
                                / 4
                            )
                            module.weight[row, column] = (
                                torch.tensor(scaled).to(torch.bfloat16).float()
                            )

    def test_votes_go_down_for_scaled_blocks(self, evaluated: Bench) -> None:
        """A run that is killed in round 2 and resumed equals a run that was never killed.

        The server also pushes the result to the clients.
        """
        changes = {
            "fedprllm__weight_scaling": True,
            "fedprllm__continue_behind": "scaled",
            "fedprllm__vote_group": "column",
        }
        grid = evaluated.grid(**changes)
        requests = list[Any]()
        grid.before_push = requests.append
        uninterrupted = evaluated.run(grid, **changes)
        votes = votes_of(grid.received)
        bodies = [read(request.content) for request in requests]
        orders = [body for body in bodies if body.header.kind == "train"]
        assert [(set(body.blobs), body.fields) for body in orders] == [(set(), {})] * 4 + [
            ({"block-0000", "votes-0000"}, {"num_voters": [4], "decided": 1})
        ] * 4
        for name, counts in load(orders[-1].blobs["votes-0000"]).items():
            for place, count in enumerate(counts.flatten().tolist()):
                assert count == votes["block-0000", f"{name}.prune_mask", place]

        folder = evaluated.killed(third_order_of(2), **changes)
        resumed = evaluated.run(resume_from=str(folder), **changes)
        assert results(resumed) == results(uninterrupted)
        masked = evaluated.run(**{**changes, "fedprllm__continue_behind": "masked"})
        assert model_files(masked) != model_files(uninterrupted)

    def test_one_client_iterative_is_one_shot(self, bench: Bench) -> None:
        """The decision of one voter equals its vote if the comparison groups are equal.

        Both strategies therefore run the same pruned blocks.
        """
        common = {"num_clients": 1, "fedprllm__vote_group": "row"}
        iterative = bench.run(**common)
        one_shot = bench.run(**common, pruning__strategy="one-shot")
        assert model_files(iterative) == model_files(one_shot)
        assert summary(iterative)["rounds"] == 2
        assert summary(one_shot)["rounds"] == 1

    def test_only_decisions_travel_back(self, plain: Uninterrupted) -> None:
        entries = [
            json.loads(line) for line in (plain.folder / "ledger.jsonl").read_text().splitlines()
        ]
        down = {
            (e["round"], e["block"])
            for e in entries
            if e["direction"] == "down" and e["kind"] == "train" and e["block"]
        }
        up = {
            (e["round"], e["block"])
            for e in entries
            if e["direction"] == "up" and e["kind"] == "train" and e["block"]
        }
        assert down == {(2, "block-0000")}
        assert up == {(1, "block-0000"), (2, "block-0001")}

    @pytest.mark.parametrize("behind", ["masked", "scaled"])
    def test_client_recovers_lost_hidden_states(self, bench: Bench, behind: str) -> None:
        """The client's state is removed before round 3.

        The client starts from the first block again, and the result is the same as without the
        loss.
        """
        changes: dict[str, Any] = {"model": str(save_tiny_llama(bench.folder / "deep", blocks=4))}
        changes |= {
            "fedprllm__weight_scaling": behind == "scaled",
            "fedprllm__continue_behind": behind,
        }
        whole = bench.run(**changes)
        grid = bench.grid(**changes)
        lost = []
        kinds = []

        def lose(message: Message) -> None:
            header = read(message.content).header
            if (header.kind, header.server_round, header.client) == ("train", 3, 2) and not lost:
                (folder,) = (bench.folder / "state").glob(f"{header.lineage}/node-00002")
                lost.append(shutil.rmtree(folder))
            if header.server_round == 3:
                kinds.append((header.kind, header.client, header.part))

        grid.before_push = lose
        folder = bench.run(grid, **changes)
        assert lost
        assert model_files(folder) == model_files(whole)
        assert {client["status"] for client in summary(folder)["clients"]} == {"completed"}
        own = [(kind, part) for kind, client, part in kinds if client == 2]
        assert own == [
            ("train", 0),
            *(("push", part) for part in range(len(own) - 2)),
            ("train", 0),
        ]
        assert len(own) >= 3
        assert {kind for kind, client, _ in kinds if client != 2} == {"train"}
        (noted,) = [event for event in events(folder) if event["event"] == "lost"]
        assert noted["client"] == 2

    @pytest.mark.parametrize("damaged", ["activations.json", "*.blob"])
    def test_client_recovers_damaged_state(
        self, bench: Bench, plain: Uninterrupted, damaged: str
    ) -> None:
        grid = bench.grid()

        def damage(message: Message) -> None:
            header = read(message.content).header
            if (header.kind, header.server_round, header.client) == (
                "train",
                2,
                2,
            ) and header.attempt == 1:
                folder = bench.folder / "state" / header.lineage / "node-00002" / "r001"
                for file in folder.glob(damaged):
                    file.write_bytes(file.read_bytes()[:-3])

        grid.before_push = damage
        folder = bench.run(grid)
        assert model_files(folder) == model_files(plain.folder)
        assert [event["client"] for event in events(folder) if event["event"] == "lost"] == [2]

    def test_a_forged_loss_costs_its_sender_alone(self, bench: Bench) -> None:
        """A client has nothing to lose in round 1.

        In a later round it must not report a loss under another client's number.
        """
        grid = bench.grid()

        def forge(client: int, server_round: int) -> Any:
            def tampered(request: Message, reply: Message) -> Message:
                header = read(request.content).header
                if (header.kind, header.server_round) != ("train", server_round):
                    return reply
                lost = failure(header.model_copy(update={"client": client}), "gone", lost=True)
                return Message(write(lost), reply_to=request)

            return tampered

        grid.tamper = {1: forge(1, 1), 2: forge(3, 2)}
        document = summary(bench.run(grid))
        assert [client["status"] for client in document["clients"]] == [
            "completed",
            "dropped",
            "dropped",
            "completed",
        ]

    def test_second_state_loss_drops_client(self, bench: Bench) -> None:
        grid = bench.grid()

        def forget(message: Message) -> None:
            header = read(message.content).header
            if (header.kind, header.server_round) == ("train", 2):
                shutil.rmtree(
                    bench.folder / "state" / header.lineage / "node-00001", ignore_errors=True
                )

        grid.before_push = forget
        clients = summary(bench.run(grid))["clients"]
        assert [client["status"] for client in clients] == [
            "completed",
            "dropped",
            "completed",
            "completed",
        ]
        assert (
            clients[1]["reason"] == "train: this client no longer has the hidden states of round 1"
        )

    def test_resumption_restores_lost_client_state(
        self, bench: Bench, plain: Uninterrupted
    ) -> None:
        killed = bench.killed(lambda header: (header.kind, header.server_round) == ("train", 2))
        lineage = json.loads((killed / "run.json").read_text())["lineage"]
        shutil.rmtree(bench.folder / "state" / lineage / "node-00000")
        assert model_files(bench.run(resume_from=str(killed))) == model_files(plain.folder)


def input_norms(
    model: Any, modules: dict[str, Any], samples: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the L2 norm of each input channel over all tokens, one sequence at a time."""
    sums: dict[str, torch.Tensor] = {}

    def add(name: str, inputs: torch.Tensor) -> None:
        sums[name] = sums.get(name, 0) + inputs[0].double().square().sum(dim=0)

    hooks = [
        m.register_forward_pre_hook(lambda _, i, name=name: add(name, i[0]))
        for name, m in modules.items()
    ]
    for sample in samples:
        model(input_ids=sample[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return {name: total.sqrt().float() for name, total in sums.items()}


def lowest_half_of_each_row(scores: torch.Tensor) -> torch.Tensor:
    mask = torch.zeros(scores.shape, dtype=torch.int64)
    for row, values in enumerate(scores.tolist()):
        for column in sorted(range(len(values)), key=lambda c: (values[c], c))[
            : int(len(values) * 0.5)
        ]:
            mask[row, column] = 1
    return mask


def most_voted_half(votes: torch.Tensor, magnitude: torch.Tensor) -> set[int]:
    flat = votes.flatten().tolist()
    size = magnitude.flatten().tolist()
    return set(
        sorted(range(len(flat)), key=lambda i: (-flat[i], size[i], i))[: int(len(flat) * 0.5)]
    )
