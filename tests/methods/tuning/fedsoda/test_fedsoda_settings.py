"""Settings of FedSODA: baselines, sampling, resumption, variants and refusals."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message
from safetensors.torch import load, load_file

import client_app.methods.tuning.fedsoda
from client_app.methods.tuning import adapter_averaging as tuning
from espalier.errors import EspalierError
from espalier.hf.opening.opened_model import OpenedModel, open_model
from espalier.messages.message import MessageBody
from espalier.messages.records import address, read
from espalier.methods.tuning.adapters.tensors import trained
from espalier.seeds import derive_seed
from espalier.settings.run import parse
from espalier.training.initial_values import initial_values
from espalier.training.loop import Loop
from tests.bench import Bench, Killed, model_files, private_text, summary
from tests.in_process import InProcessGrid
from tests.methods.promises.federations import Uninterrupted
from tests.methods.tuning.fedsoda.fedsoda_runs import BLOCKS, FedSodaRuns, _zeros, asked
from tests.tiny_model import save_tiny_llama

EVENLY = {"drop": "uniform"}


class TestFedSoda(FedSodaRuns):
    def test_no_baseline_without_aligned_emulator(self, bench: Bench) -> None:
        """The client would train and measure another sub-model than the other clients."""
        grid = bench.grid(evaluation__local_baseline=True)
        changes = {"evaluation__local_baseline": True}

        def lose(message: Message) -> None:
            header = read(message.content).header
            if (header.kind, header.client) == ("local_baseline", 1):
                for document in (bench.folder / "state").glob("*/node-00001/lasting/emulator.json"):
                    document.unlink()

        grid.before_push = lose
        client = summary(bench.run(grid, **changes))["clients"][1]
        assert "the site has the emulator's LoRA of a different round" in client["reason"]

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
        alone = tuning.local_baseline

        def noted(site: Any, request: MessageBody, given: Any) -> MessageBody:
            beside.append(given)
            return alone(site, request, given)

        monkeypatch.setattr(tuning, "local_baseline", noted)
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

    def test_another_public_text_is_no_resumption(self, bench: Bench) -> None:
        text = bench.folder / "align.txt"
        text.write_text(private_text(98))
        folder = bench.killed(lambda header: header.server_round == 2, public__text=str(text))
        text.write_text(private_text(97))
        with pytest.raises(
            EspalierError,
            match=r"public.text = '.*align.txt': is not the text that the run began with",
        ):
            bench.run(resume_from=str(folder), public__text=str(text))

    def test_run_with_never_sampled_client_resumes(self, bench: Bench) -> None:
        """A client that no round sampled gets the sub-model only for the evaluation."""
        few = {"federation__sampled_clients": 0.25, "evaluation__local_baseline": True}
        whole = bench.run(bench.grid(**few), **few)
        folder = bench.killed(lambda header: header.kind == "evaluate", bench.grid(**few), **few)
        assert json.loads((folder / "checkpoint" / "state.json").read_text())["round"] == 2
        resumed = bench.run(bench.grid(**few), resume_from=str(folder), **few)
        assert model_files(resumed) == model_files(whole)

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
            ({"public__text": "/nowhere.txt"}, r"/nowhere.txt(?s:.*)public.text"),
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
            bench.run(bench.grid(), public__text=str(text))

    def test_alignment_interrupted_by_kill_restarts(
        self, bench: Bench, plain: Uninterrupted, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        backward = Loop._backward

        def killed_in_the_second(loop: Any, called: Any, step: int) -> float:
            if (
                len(loop.model.model.layers) == BLOCKS - 1
                and loop.settings.steps == 2
                and loop.betas == (0.9, 0.95)
            ):
                raise Killed
            return backward(loop, called, step)

        with monkeypatch.context() as patched:
            patched.setattr(Loop, "_backward", killed_in_the_second)
            with pytest.raises(Killed):
                bench.run()
        (folder,) = bench.runs()
        assert json.loads((folder / "checkpoint" / "state.json").read_text())["round"] == 1
        resumed = bench.run(bench.grid(), resume_from=str(folder))
        assert model_files(resumed) == model_files(plain.folder)


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
