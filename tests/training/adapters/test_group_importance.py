"""Importance of prunable groups by the paper's equations with dense matrices.

A cut model and a masked one give the same values.
"""

import gc
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from espalier.data.tasks.item import Batch
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.structured.selection import cut_trained
from espalier.messages.blobs.cut_bits import pack_bits
from espalier.methods.tuning.fedspine import FedSpineSettings, trained
from espalier.models.groups import Groups
from espalier.models.structure import GROUP_KINDS
from espalier.settings.run import parse
from espalier.training.adapter_training import AdapterTraining
from espalier.training.group_importance import GroupImportance
from espalier.training.loss import num_counted, summed_loss
from espalier.training.sequences import sequences_of_step
from tests.hf.tiny_encoders import save_encoder
from tests.hf.tiny_models import CPU, VOCABULARY, llama_config, save_model, tiny_config
from tests.training.adapters.test_adapter_training import Values, sequences, start_of

CHANNELS = {"mlp.up": ("channels", 0, 1), "mlp.down": ("channels", 1, 1)}
QKV = [0] * 32 + [1] * 32 + ([0] * 16 + [1] * 16) * 2
"""Group of each row of a fused matrix: queries, keys and values."""
SIDES: dict[str, dict[str, tuple[str, int, int | list[int]]]] = {
    "llama": {
        "attn.q": ("groups", 0, 32), "attn.k": ("groups", 0, 16), "attn.v": ("groups", 0, 16),
        "attn.o": ("groups", 1, 32), "mlp.gate": ("channels", 0, 1), **CHANNELS,
    },
    "phi3": {
        "attn.qkv": ("groups", 0, QKV), "attn.o": ("groups", 1, 32),
        "mlp.gateup": ("channels", 0, [*range(12)] * 2), "mlp.down": ("channels", 1, 1),
    },
    "roberta": {
        "attn.q": ("groups", 0, 16), "attn.k": ("groups", 0, 16), "attn.v": ("groups", 0, 16),
        "attn.o": ("groups", 1, 16), **CHANNELS,
    },
}  # fmt: skip
"""Kind and side of the groups in a matrix, with the rows or columns per group, or each one's group.

Heads have width 16; LLaMA and Phi have two of them per group.
"""
FILES = {
    "llama": ("model.layers", {
        "attn.q": "self_attn.q_proj", "attn.k": "self_attn.k_proj", "attn.v": "self_attn.v_proj",
        "attn.o": "self_attn.o_proj", "mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj",
    }),
    "phi3": ("model.layers", {
        "attn.qkv": "self_attn.qkv_proj", "attn.o": "self_attn.o_proj",
        "mlp.gateup": "mlp.gate_up_proj", "mlp.down": "mlp.down_proj",
    }),
    "roberta": ("roberta.encoder.layer", {
        "attn.q": "attention.self.query", "attn.k": "attention.self.key",
        "attn.v": "attention.self.value", "attn.o": "attention.output.dense",
        "mlp.up": "intermediate.dense", "mlp.down": "output.dense",
    }),
}  # fmt: skip
GROUPS = {"llama": 2, "phi3": 2, "roberta": 4}
"""Number of attention groups in each of two blocks, in addition to 12 channels."""
CUT = {
    "llama": [0, 3, 4, 9, 15, 21, 27],
    "phi3": [0, 3, 4, 9, 15, 21, 27],
    "roberta": [0, 3, 5, 6, 9, 15, 17, 21, 27],
}
"""Cut groups: attention groups and channels of both blocks."""
CLOSE = {"llama": 1e-6, "phi3": 1e-6, "roberta": 1e-4}
"""Absolute tolerance of trained values.

AdamW takes steps of 0.01 even for gradients near the rounding error, as some of the encoder's are.
"""
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
SST2 = {"task.name": "sst2", "data.source": "files", "data.path": "nowhere"}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
FAMILIES = ["llama", "phi3", "roberta"]


class Classified:
    """Seven sequences of eight tokens, each of one of two classes."""

    def __len__(self) -> int:
        return 7

    def batch(self, numbers: Sequence[int]) -> Batch:
        """Return the batch of these sequences."""
        every = torch.randint(4, VOCABULARY, (7, 8), generator=torch.Generator().manual_seed(4))[
            list(numbers)
        ]
        return Batch(
            every, torch.ones_like(every), torch.tensor([number % 2 for number in numbers])
        )


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny models; the encoder has biases everywhere."""
    return {
        "llama": save_model(
            tmp_path_factory.mktemp("llama"),
            llama_config(**SIZES, num_key_value_heads=2, head_dim=16),
        ),
        "phi3": save_model(tmp_path_factory.mktemp("phi3"), tiny_config("phi3", **SIZES)),
        "roberta": save_encoder(
            tmp_path_factory.mktemp("roberta"), "roberta", **SIZES, **NO_DROPOUT
        ),
    }


def watched(
    model: OpenedModel,
    structure: bytes | None = None,
    more: Any = None,
    before: Callable[[int, Any], None] = lambda step, gradients: None,
    **changes: Any,
) -> tuple[AdapterTraining, GroupImportance]:
    classifies = model.family.kind == "encoder"
    given = {f"fedspine.{key}": value for key, value in changes.items()} | (
        SST2 if classifies else {}
    )
    flat = {
        "method": "fedspine",
        "lora.rank": 3,
        "lora.alpha": 6.0,
        "lora.targets": "all",
        "training.batch-size": 2,
        **given,
    }
    flat |= more or {}
    settings = parse({**flat, "training.learning-rate": 0.01, "training.steps": 3})
    base = OpenedModel(model.directory)
    adapters = trained(base.plan, settings, None, structure)
    own = Classified() if classifies else sequences()
    watch = GroupImportance(
        model, adapters, lambda: training.adapted, settings.of(FedSpineSettings)
    )

    def observer(step: int, gradients: Any) -> None:
        before(step, gradients)
        watch(step, gradients)

    training = AdapterTraining(model, CPU, settings, adapters, own, 5, observer=observer)
    return training, watch


def start_with_head(training: AdapterTraining) -> Values:
    """Return the values of ``start_of``, with a random head for an encoder."""
    generator = torch.Generator().manual_seed(9)
    whole = training.adapters.whole
    return start_of(training) | {
        key: {name: 0.2 * torch.randn(shape, generator=generator) for name, shape in own.items()}
        for key, own in whole.items()
    }


def weights_of(directory: Path, family: str, block: int) -> dict[str, Tensor]:
    stored: dict[str, Tensor] = {}
    for file in directory.glob("*.safetensors"):
        stored |= load_file(file)
    prefix, paths = FILES[family]
    return {
        name: stored[f"{prefix}.{block}.{path}.weight"].double() for name, path in paths.items()
    }


@pytest.mark.parametrize("score", ["exact", "group"])
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_units_are_worth_what_the_equations_say(
    directories: dict[str, Path], family: str, score: str, normalise: bool
) -> None:
    """Equations 10 to 12 with dense matrices over three steps, and equation 13.

    Biases and heads do not count.
    """
    model = OpenedModel(directories[family])
    seen: list[tuple[Values, Values]] = []

    def note(step: int, gradients: Any) -> None:
        seen.append((training.adapted.values(), {key: dict(own) for key, own in gradients.items()}))

    training, watch = watched(model, before=note, score=score, normalise=normalise, eta=0.75)
    training.run(start_with_head(training), 0, 3)
    average = None
    terms = []
    for values, gradients in seen:
        pieces = []
        term = 0.0
        for block in range(2):
            weights = weights_of(model.directory, family, block)
            key = f"block-{block:04d}"
            numbers = {"groups": GROUPS[family], "channels": 12}
            units = {
                kind: torch.zeros(number, dtype=torch.float64) for kind, number in numbers.items()
            }
            for name, (kind, side, size) in SIDES[family].items():
                a, b = (values[key][f"{name}.lora_{which}"].double() for which in "ab")
                ga, gb = (gradients[key][f"{name}.lora_{which}"].double() for which in "ab")
                product = (gb @ a + b @ ga - gb @ ga) * (weights[name] + 2.0 * b @ a)
                lines = (product**2 if score == "exact" else product).sum(dim=1 - side)
                sums = torch.zeros_like(units[kind]).index_add(0, owners(size, len(lines)), lines)
                own = sums if score == "exact" else sums**2
                units[kind] += own / own.norm() if normalise else own
                term += float(((b * gb) ** 2).sum())
            pieces += [units["groups"], units["channels"]]
        found = torch.cat(pieces)
        average = found if average is None else 0.75 * average + 0.25 * found
        terms.append(term)
    assert watch.importance is not None
    assert average is not None
    torch.testing.assert_close(watch.importance, average, rtol=1e-5, atol=1e-12)
    assert watch.taylor == pytest.approx(sum(terms) / 3, rel=1e-5)


@pytest.mark.parametrize("score", ["mask", "exact"])
@pytest.mark.parametrize("family", FAMILIES)
def test_smaller_round_equals_masked_one(
    directories: dict[str, Path], family: str, score: str, tmp_path: Path
) -> None:
    """The reference has zeros in the cut rows and columns of its base and initial adapters."""
    base = OpenedModel(directories[family])
    groups = Groups.of(base.plan)
    cut = groups.none
    cut[CUT[family]] = True
    structure = groups.structure(cut)
    training, watch = watched(OpenedModel(base.directory, structure), pack_bits(cut), score=score)
    removed = [
        {kind: cut[groups.at(index, kind)] for kind in GROUP_KINDS} for index in groups.blocks
    ]
    masked = masked_copy(base.directory, tmp_path / "masked", family, removed)
    whole_training, whole_watch = watched(masked, score=score)
    start = start_with_head(whole_training)
    for block, gone in enumerate(removed):
        for name, value in start[f"block-{block:04d}"].items():
            zero_out(value, name, family, gone)
    with watch.watching():
        smaller, _ = training.run(cut_trained(start, base.plan, structure), 0, 3)
    with whole_watch.watching():
        whole, _ = whole_training.run(start, 0, 3)
    expected = cut_trained(whole, base.plan, structure)
    for key, own in expected.items():
        for name, value in own.items():
            torch.testing.assert_close(smaller[key][name], value, rtol=1e-4, atol=CLOSE[family])
    assert watch.importance is not None
    assert whole_watch.importance is not None
    torch.testing.assert_close(
        watch.importance, whole_watch.importance[~torch.from_numpy(cut)], rtol=1e-3, atol=1e-9
    )
    assert watch.taylor == pytest.approx(whole_watch.taylor, rel=1e-4)


def owners(size: int | list[int], lines: int) -> Tensor:
    """Return the group of each row or column: (lines,), int64."""
    return torch.tensor(size) if isinstance(size, list) else torch.arange(lines) // size


def zero_out(value: Tensor, name: str, family: str, cut: Any) -> None:
    """Set the cut rows or columns of one tensor to zero."""
    linear, _, kind = name.rpartition(".")
    of, side, size = SIDES[family][linear]
    gone = torch.from_numpy(cut[of])
    if (kind, side) in (("lora_b", 0), ("weight", 0), ("bias", 0)):
        value[gone[owners(size, len(value))]] = 0
    elif (kind, side) in (("lora_a", 1), ("weight", 1)):
        value[:, gone[owners(size, value.shape[1])]] = 0


def masked_copy(directory: Path, target: Path, family: str, cuts: Any) -> OpenedModel:
    """Return the model with zeros in place of the cut groups."""
    target.mkdir()
    for file in directory.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    prefix, paths = FILES[family]
    for file in target.glob("*.safetensors"):
        tensors = load_file(file)
        for block, cut in enumerate(cuts):
            for name, path, kind in (
                (name, path, kind) for name, path in paths.items() for kind in ("weight", "bias")
            ):
                if (value := tensors.get(f"{prefix}.{block}.{path}.{kind}")) is not None:
                    zero_out(value, f"{name}.{kind}", family, cut)
        save_file(tensors, file, {"format": "pt"})
    return OpenedModel(target)


@pytest.mark.parametrize("score", ["mask", "exact"])
def test_what_was_watched_is_freed(directories: dict[str, Path], score: str) -> None:
    """Otherwise the activations of every step would stay in memory."""
    training, watch = watched(OpenedModel(directories["llama"]), score=score)
    prefix, paths = FILES["llama"]
    module = training.adapted.whole.get_submodule(f"{prefix}.0.{paths['mlp.down']}")
    seen = list[Any]()
    module.register_forward_pre_hook(lambda _, inputs: seen.append(weakref.ref(inputs[0])))
    with watch.watching():
        training.run(start_with_head(training), 0, 2)
    gc.collect()
    assert len(seen) == 2
    assert [ref() for ref in seen] == [None, None]


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_masks_are_worth_their_gradients_squared(
    directories: dict[str, Path], family: str, accumulation: int
) -> None:
    """The reference multiplies the outputs of heads and channels by masks of ones, with autograd.

    The batches of a step count together, and no hook stays.
    """
    model = OpenedModel(directories[family])
    more = {"training.accumulation": accumulation, "lora.dropout": 0.0}
    training, watch = watched(model, score="mask", normalise=False, more=more)
    start = start_with_head(training)
    # The head of an encoder has a hook of its own.
    hooks = [len(module._forward_pre_hooks) for module in training.adapted.whole.modules()]
    with watch.watching():
        training.run(start, 0, 1)
    assert [len(module._forward_pre_hooks) for module in training.adapted.whole.modules()] == hooks
    training.adapted.set(start)
    whole = training.adapted.whole
    masks = []
    prefix, paths = FILES[family]
    for block in range(2):
        for name, number in (("attn.o", GROUPS[family]), ("mlp.down", 12)):
            mask = torch.ones(number, requires_grad=True)
            masks.append(mask)
            size = SIDES[family][name][2]

            def masked(_: Any, inputs: Any, mask: Tensor = mask, size: int = size) -> Any:
                return (inputs[0] * mask.repeat_interleave(size),)

            whole.get_submodule(f"{prefix}.{block}.{paths[name]}").register_forward_pre_hook(masked)
    batch = training.sequences.batch(sorted(sequences_of_step(7, 2 * accumulation, 0, 5)))
    loss = summed_loss(whole, batch, CPU.device) / num_counted(batch)
    gradients = torch.autograd.grad(loss, masks)
    expected = torch.cat([gradient.double().square() for gradient in gradients])
    assert watch.importance is not None
    torch.testing.assert_close(watch.importance, expected, rtol=1e-3, atol=1e-10)


@pytest.mark.parametrize("score", ["mask", "exact"])
def test_skipped_step_leaves_nothing_behind(directories: dict[str, Path], score: str) -> None:
    """A weight gradient is not finite while those of the masks are.

    The next step then counts as the first.
    """

    def of_two_steps(first_is_broken: bool) -> tuple[Tensor | None, float]:
        training, watch = watched(OpenedModel(directories["llama"]), score=score, normalise=False)
        calls = list[int]()

        def broken(gradient: Tensor) -> Tensor:
            calls.append(1)
            return gradient * torch.inf if len(calls) == 1 else gradient

        first_step, steps = (0, 2) if first_is_broken else (1, 1)
        if first_is_broken:
            next(iter(next(iter(training.adapted.parameters.values())).values())).register_hook(
                broken
            )
        with watch.watching():
            _, trained = training.run(start_with_head(training), first_step, steps)
        assert trained.skipped_steps == int(first_is_broken)
        assert len(watch.terms) == 1
        return watch.importance, watch.taylor

    (units, taylor), (expected, of_one) = of_two_steps(True), of_two_steps(False)
    assert units is not None
    assert expected is not None
    assert torch.equal(units, expected)
    assert taylor == of_one


def test_overflowing_mask_gradients_do_not_count(directories: dict[str, Path]) -> None:
    """A group's output times its gradient can overflow while no weight's gradient does.

    The step still trains.
    """

    def overflow(step: int, gradients: Any) -> None:
        if step == 0:
            watch._of_masks[0, "groups"][1] = torch.inf

    training, watch = watched(OpenedModel(directories["llama"]), before=overflow, score="mask")
    with watch.watching():
        _, trained = training.run(start_with_head(training), 0, 2)
    assert (trained.skipped_steps, len(watch.terms)) == (0, 1)
    assert watch.importance is not None
    assert bool(torch.isfinite(watch.importance).all())
