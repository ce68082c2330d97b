"""Methods whose server has only the sum of the clients' summands decide as from the replies."""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from client_app.summands.adapters import of_adapters
from client_app.summands.plain_blob import PlainBlob
from espalier.messages.sums.summed_weights import MAX_WEIGHT, WEIGHT
from espalier.messages.tensor_blobs import pack_tensors
from espalier.methods.examples import plan_of, settings_for
from espalier.methods.pruning.slicegpt import moment_scale
from espalier.methods.tuning.adapters.summands import VALUE_EXPONENT, value_scale
from espalier.models.plan import ModelPlan
from espalier.settings.registry import METHODS
from espalier.settings.run import parse
from pruning_kernels.bounded_fixed_point import signed_bits
from server_app.artifacts import personal_models
from strategies.pruning.slicegpt import SliceGpt
from tests.bench import Bench, Home, home, private_text
from tests.federation.secure_sum.added_summands import SummedRun
from tests.tiny_model import save_tiny_llama

MEAN = {"federation.aggregation-rule": "mean"}
TUNED = {
    "federation.rounds": 2,
    "training.steps": 2,
    "training.batch-size": 2,
    "training.learning-rate": 0.01,
    "lora.rank": 2,
    "lora.alpha": 4.0,
    **MEAN,
}
EMPTY = ModelPlan((), 0)
BY_SAMPLES = {"federation.client-weights": "samples", **MEAN}
SFT_P = {
    "sft-p.embedding": 8,
    "sft-p.code": 4,
    "sft-p.learning-rate": 0.01,
    "pruning.keep-models": False,
    "pruning.ratio": 0.2,
}
SODA = {
    "lora.targets": "attn.q,attn.v,mlp.down",
    "fedsoda.adapter-layers": 1,
    "fedsoda.group-layers": 1,
    "fedsoda.groups": 1,
    "fedsoda.pre-align-steps": 1,
    "fedsoda.realign-every": 0,
    "public.samples": 4,
    "part-bytes": 65536,
}
SPA = {"fedspallm.capabilities": "1", **MEAN}


@pytest.fixture(autouse=True)
def state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ESPALIER_STATE_DIR", str(tmp_path / "state"))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Home:
    return home(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Home:
    return save_deep(tmp_path_factory.mktemp("deep"))


def save_deep(folder: Path) -> Home:
    """Save a model of three blocks, wide enough for NF4, and two texts."""
    model = save_tiny_llama(folder / "base", blocks=3, hidden=64, feed_forward=64, std=0.1)
    (folder / "public.txt").write_text("\n\n".join(private_text(99).split("\n\n")[:15]))
    (folder / "align.txt").write_text("\n\n".join(private_text(98).split("\n\n")[:15]))
    return Home(model, folder / "public.txt")


def run_of(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    home: Home,
    method: str,
    settings: dict[str, Any],
) -> SummedRun:
    """Return a run with three clients whose numbers of samples differ."""
    bench = Bench(tmp_path, method, settings, num_clients=3, home=home)
    run = SummedRun(bench)
    run.run(monkeypatch)
    assert all(len(folded.clients) == 3 for folded in run.rounds)
    return run


EXACT = {
    "fedprllm": {},
    "fedprllm iterative": {
        "pruning.strategy": "iterative",
        "fedprllm.weight-scaling": True,
        "fedprllm.vote-group": "column",
        "fedprllm.ties": "random",
    },
    "flap": {"pruning.ratio": 0.3, **MEAN},
    "llm-pruner": {
        "pruning.ratio": 0.3,
        "llm-pruner.spare-first": 0,
        "llm-pruner.spare-last": 0,
        "llm-pruner.element": "signed",
        **MEAN,
    },
    "fedspallm wanda": {
        "fedspallm.local-method": "wanda",
        "federation.rounds": 2,
        "fedspallm.schedule": "linear",
        **{key: value for key, value in SPA.items() if key.startswith("fedspallm")},
    },
}


@pytest.mark.parametrize("name", EXACT)
def test_sums_decide_the_same_bytes(
    name: str, shared: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States name the checkpoint's blobs by their hashes, so equal states have equal bytes."""
    run = run_of(tmp_path, monkeypatch, shared, name.split()[0], EXACT[name])
    for folded in run.rounds:
        assert folded.state == folded.state_of_sums


@pytest.mark.parametrize("weights", ["samples", "equal"])
def test_mean_of_moments_is_off_by_less_than_stated(
    weights: str, shared: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[list[torch.Tensor]] = []
    find = SliceGpt._find

    def noted(self: SliceGpt, moments: Iterator[torch.Tensor]) -> None:
        found.append(list(moments))
        find(self, iter(found[-1]))

    monkeypatch.setattr(SliceGpt, "_find", noted)
    settings = {
        "slicegpt.width-pruning-ratio": 0.25,
        "slicegpt.multiple": 4,
        **MEAN,
        "federation.client-weights": weights,
    }
    run = run_of(tmp_path, monkeypatch, shared, "slicegpt", settings)
    scale = moment_scale(run.rounds[0].plain.run.model.plan, parse(run.bench.config()))
    assert scale.fraction_bits >= 30
    # Three clients with two samples each.
    stated = 3 / 2 * 2.0**-scale.fraction_bits / (6 if weights == "samples" else 3)
    plain, summed = found
    distances = [float((one - other).abs().max()) for one, other in zip(plain, summed, strict=True)]
    assert 0 < max(distances) <= stated + 1e-15


TUNING = {
    "fedpetuning": TUNED | BY_SAMPLES,
    "fedpetuning equal": TUNED | {"federation.client-weights": "equal"},
    "sft-p": TUNED | SFT_P | BY_SAMPLES,
    "fedsoda": TUNED | SODA | BY_SAMPLES,
}


@pytest.mark.parametrize("name", TUNING)
def test_mean_of_adapters_is_off_by_less_than_stated(
    name: str, shared: Home, deep: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both means are rounded to float32 at last, so they may differ by a unit of it."""
    # Drawing takes most of a run's time.
    monkeypatch.setattr(personal_models, "draw", lambda figures, folder: [])
    settings = dict(TUNING[name])
    home = deep if name == "fedsoda" else shared
    if name == "fedsoda":
        settings["public.text"] = str(deep.public.parent / "align.txt")
    run = run_of(tmp_path, monkeypatch, home, name.split()[0], settings)
    assert len(run.rounds) == 2
    scale = value_scale(parse(run.bench.config()))
    weighed = settings["federation.client-weights"] == "samples"
    folded = run.rounds[-1]
    sent = [run.made[len(run.rounds), client] for client in folded.clients]
    total = sum(int(own[WEIGHT][WEIGHT][0]) for own in sent) if weighed else 3
    stated = 3 / 2 * 2.0**-scale.fraction_bits / total
    results = [method.averager.adapters() for method in (folded.plain, folded.summed)]
    for key in results[0].blobs:
        summed = results[1].tensors(key)
        for tensor_name, plain in results[0].tensors(key).items():
            unit = torch.finfo(torch.float32).eps * plain.abs()
            assert bool(((plain - summed[tensor_name]).abs() <= stated + unit).all())


def test_kept_weights_of_sparsegpt_are_off_by_less_than_stated(
    shared: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(tmp_path, monkeypatch, shared, "fedspallm", SPA)
    (folded,) = run.rounds
    for index in range(2):
        plain, summed = (
            method.result.matrices(index)  # type: ignore[attr-defined]
            for method in (folded.plain, folded.summed)
        )
        for name, matrix in plain.items():
            np.testing.assert_array_equal(matrix.words, summed[name].words)
            # The file's bfloat16 has 8 bits; a rounding boundary may lie between the two means.
            torch.testing.assert_close(
                matrix.kept.float(), summed[name].kept.float(), rtol=2.0**-7, atol=2.0**-19
            )
            differ = (matrix.kept != summed[name].kept).double().mean()
            assert float(differ) < 0.02


def test_clipping_bounds_what_a_client_adds() -> None:
    """A client with values of any size, and a billion samples, adds its weight times the bound."""
    run = parse({"method": "fedpetuning", "num-clients": 8, "federation.max-update-ratio": 1e6})
    values = np.array([1e30, -1e30, 64.0, 63.5], np.float32)
    report = {"samples": 10**9}
    packed = pack_tensors({"attn.q.lora_a": values})
    found = of_adapters(PlainBlob("block-0000", lambda: packed, report, EMPTY, run))
    spec = signed_bits(VALUE_EXPONENT + value_scale(run).fraction_bits, 8, MAX_WEIGHT)
    numbers = value_scale(run).numbers(found["attn.q.lora_a"], spec) / MAX_WEIGHT
    assert numbers.tolist() == [64.0, -64.0, 64.0, 63.5]
    weight = of_adapters(PlainBlob(WEIGHT, lambda: b"", report, EMPTY, run))
    assert weight[WEIGHT].tolist() == [MAX_WEIGHT]


@pytest.mark.parametrize(
    ("method", "settings", "words"),
    [
        ("fedprllm", {"fedprllm.ties": "random"}, ""),
        ("pooled-pruning", {}, ""),
        ("flap", {}, ""),
        ("fedpetuning", {}, ""),
        ("fedpetuning", {"fedpetuning.aggregation": "svd"}, "aggregation = 'svd' averages"),
        ("fedpetuning", {"federation.wire-dtype": "nf4"}, "wire-dtype = 'nf4' rounds"),
        ("sft-p", {}, ""),
        ("llm-pruner", {"llm-pruner.element": "squared"}, "llm-pruner.element = 'squared'"),
        ("llm-pruner", {"llm-pruner.rescale": "groups"}, "llm-pruner.rescale = 'groups'"),
        ("llm-pruner", MEAN, ""),
        ("slicegpt", {"slicegpt.covariances": "public"}, "clients send nothing"),
        ("fedspallm", SPA | {"fedspallm.sampled-layers": 0.5}, "fedspallm.sampled-layers = 0.5"),
        ("fedspallm", {}, "fedspallm.capabilities = ''"),
        ("fedspallm", SPA | {"fedspallm.capabilities": "1,2"}, "capabilities = '1,2'"),
        ("fedspallm", {"fedspallm.capabilities": "3,3"}, ""),
        ("fedspallm", SPA | {"federation.client-weights": "samples"}, "client-weights = 'samples'"),
        ("fedspallm", SPA, ""),
    ],
)
def test_settings_that_need_single_replies(
    method: str, settings: dict[str, Any], words: str
) -> None:
    run = parse({"method": method, "num-clients": 4, **settings})
    found = run.job.secure_sum_fault(run.federation)
    assert re.search(words, found) if words else found == ""


def test_every_method_has_summands_or_says_why_not() -> None:
    for row in METHODS.values():
        assert bool(row.summands) == bool(row.to_summands)
        assert not (row.summands and row.summands_reason)


@pytest.mark.parametrize("method", [name for name, row in METHODS.items() if row.summands])
def test_summands_fit_into_64_bits(method: str) -> None:
    """Votes take the fewest bits; other numbers have a coarser unit with more clients."""
    for clients in (3, 8, 32, 100, 900):
        run = parse({**settings_for(method, "masked"), "num-clients": clients})
        for tensors in METHODS[method].summands(1, plan_of(method), run).values():
            for name, spec in tensors.items():
                assert 1 <= spec.bits <= 64 or spec.bits == 128
                if name.endswith(".votes"):
                    assert spec.bits == math.ceil(math.log2(clients + 1))
