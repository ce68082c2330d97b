"""FedSpine: promises of every method, and each device's own model.

Adapters follow the cuts, and importance scores stay at the devices.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, load_file
from transformers import AutoModelForCausalLM

from espalier.errors import EspalierError
from espalier.hf.opening.opened_model import OpenedModel
from strategies.base.rounds import RunFailed
from tests.bench import Bench, model_files, summary
from tests.methods.promises.contracts import outgoing_bytes
from tests.methods.promises.federations import Uninterrupted
from tests.methods.promises.personal_promises import PersonalPromises, perplexity_of, samples_of
from tests.methods.tuning.fedspine.fedspine_runs import (
    CHANNEL,
    GROUP,
    PATHS,
    UNITS,
    FedSpineRuns,
    in_bits,
    kept_of,
    len_of,
    structures,
)
from tests.tiny_model import save_tiny_llama


class TestFedSpine(FedSpineRuns, PersonalPromises):
    # ----- each device's own model ----------------------------------------------------------------

    def test_device_models_are_written_as_reported(self, bench: Bench) -> None:
        changes = {
            "pruning__keep_models": True,
            "evaluation__local_baseline": True,
            "evaluation__max_samples": 1000,
        }
        folder = bench.run(**changes)
        samples = samples_of(bench, bench.public.read_text())
        for told in summary(folder)["clients"]:
            model = AutoModelForCausalLM.from_pretrained(
                folder / "clients" / told["site"], dtype=torch.float32, trust_remote_code=True
            ).eval()
            expected = perplexity_of(model, samples)
            assert told["metrics"]["perplexity/public/federated"] == pytest.approx(
                expected, rel=1e-3
            )
            whole = OpenedModel(bench.model).plan.num_parameters
            gone = whole - sum(value.numel() for value in model.parameters())
            assert gone == round(told["metrics"]["pruned"] * 2 * (2 * GROUP + 24 * CHANNEL))

    # ----- private and outgoing values ------------------------------------------------------------

    def test_no_outgoing_byte_tells_unit_importance(self, kept: Uninterrupted) -> None:
        for client in range(kept.bench.num_clients):
            values = importances(kept, client)
            assert values.shape == (UNITS,)
            assert (values > 0).sum() > UNITS / 2
            secrets = [
                values.numpy().tobytes(),
                values.float().numpy().tobytes(),
                *(f"{value}" for value in values.tolist()),
            ]
            secrets = [
                secret if isinstance(secret, bytes) else secret.encode()
                for secret in secrets
                if len(secret) > 6
            ]
            for _, reply in kept.received:
                data = outgoing_bytes(reply)
                assert not [
                    secret for secret in secrets if secret[: max(8, len(secret) // 4)] in data
                ]

    # ----- each device's own model ----------------------------------------------------------------

    def masked_model(self, run: Uninterrupted, client: int) -> torch.nn.Module:
        """Return transformers' full model with LoRA.

        Rows and columns that a device cut are zero.
        """
        model = AutoModelForCausalLM.from_pretrained(run.bench.model, dtype=torch.float32)
        lora = load_file(run.folder / "adapter" / "adapter_model.safetensors")
        with torch.no_grad():
            for index, (block, kept) in enumerate(
                zip(model.model.layers, kept_of(run.folder, client), strict=True)
            ):
                for name, keep in kept.items():
                    prefix = f"base_model.model.model.layers.{index}.{PATHS[name]}"
                    weight = block.get_submodule(PATHS[name]).weight
                    weight += (
                        2.0 * lora[f"{prefix}.lora_B.weight"] @ lora[f"{prefix}.lora_A.weight"]
                    )
                    cut = ~torch.tensor(keep)
                    if name in ("attn.o", "mlp.down"):
                        weight[:, cut] = 0
                    else:
                        weight[cut] = 0
        return model

    def test_devices_have_cuts_and_ranks_of_their_own(self, kept: Uninterrupted) -> None:
        documents = [structures(kept.folder, client) for client in range(4)]
        assert len({json.dumps(document["structure"]) for document in documents}) > 1
        assert len({document["lora_rank"] for document in documents}) > 1
        for document, client in zip(documents, summary(kept.folder)["clients"], strict=True):
            assert (document["pruned"], document["lora_rank"]) == (
                client["metrics"]["pruned"],
                client["metrics"]["lora_rank"],
            )

    def test_units_go_by_the_gradients_of_masks(self, bench: Bench) -> None:
        """FedAPT uses one pruning ratio and one rank for all devices.

        Other groups are pruned than with LoRA's gradients, but equally many parameters.
        """
        same = {"fedspine__allocation": "fixed", "pruning__selection": "kind"}
        by_masks, by_lora = (
            bench.run(**same, fedspine__score=score) for score in ("mask", "exact")
        )
        documents = [
            [structures(folder, client) for client in range(4)] for folder in (by_masks, by_lora)
        ]
        assert [own["pruned"] for own in documents[0]] == [own["pruned"] for own in documents[1]]
        assert [own["structure"] for own in documents[0]] != [
            own["structure"] for own in documents[1]
        ]

    def test_one_client_twice_gives_the_same_bytes(self, bench: Bench) -> None:
        bench.num_clients = 1
        assert model_files(bench.run()) == model_files(bench.run())


def test_a_base_in_nf4_keeps_whole_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An attention group of 2 queries of width 32 has 64 features; 128 of 192 channels stay."""
    pytest.importorskip("bitsandbytes")
    monkeypatch.setenv("ESPALIER_STATE_DIR", str(tmp_path / "state"))
    bench = Bench(
        tmp_path, "fedspine", TestFedSpine.settings | {"training.base": "nf4"}, num_clients=2
    )
    model = str(save_tiny_llama(tmp_path / "wide", hidden=128, feed_forward=192))
    with pytest.raises(
        EspalierError, match=r"channel-multiple = 1: with training.base = 'nf4' .* set it to 64"
    ):
        bench.run(model=model)
    folder = bench.run(
        model=model,
        pruning__channel_multiple=64,
        fedspine__allocation="fixed",
        pruning__selection="kind",
    )
    # Only the whole model is quantized.
    assert len(list((tmp_path / "state" / "quantised").iterdir())) == 1
    for block in structures(folder, 1)["structure"]["blocks"]:
        assert (len_of(block["groups"]), len_of(block["channels"])) == (1, 128)


def test_run_without_devices_ends_with_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ESPALIER_STATE_DIR", str(tmp_path / "state"))
    bench = Bench(tmp_path, "fedspine", TestFedSpine.settings, num_clients=2)
    grid = bench.grid()
    for client in range(2):
        grid.tamper[client] = in_bits(lambda bits: 3)
    with pytest.raises(RunFailed, match="all groups of block 0 are cut"):
        bench.run(grid)


def importances(run: Uninterrupted, client: int) -> torch.Tensor:
    """Return a device's importance scores after the last round, from its client state."""
    (folder,) = (run.bench.folder / "state").glob(f"*/node-{client:05d}/lasting")
    document = json.loads((folder / "importance.json").read_text())
    return load((folder / f"{document['kept'][-1]['blobs']['groups']}.blob").read_bytes())["values"]
