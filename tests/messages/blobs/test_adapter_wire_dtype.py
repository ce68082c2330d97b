"""Adapters as payloads: exact bytes, round trips, error feedback, and refusal of damaged data."""

from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import Tensor

from espalier.errors import EspalierError
from espalier.messages.blobs.adapters import pack_adapters, unpack_adapters
from espalier.messages.tensor_blobs import tensor_specs, wire_specs
from espalier.settings.tables.federation import WireDtype
from pruning_kernels.lora.nf4 import LEVELS

SHAPES = {"attn.q.lora_a": (3, 33), "attn.q.lora_b": (7, 3), "mlp.up.lora_a": (1, 128)}
"""99, 21 and 128 elements: odd numbers, and one, one and two blocks of 64."""
PAYLOADS: tuple[WireDtype, ...] = get_args(WireDtype)


def tensors_of(seed: int = 0, scale: float = 1.0, shapes: Any = None) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: scale * torch.randn(shape, generator=generator)
        for name, shape in (shapes or SHAPES).items()
    }


def data_bytes(blob: bytes) -> int:
    """Return the bytes of the tensors, without the safetensors header."""
    return len(blob) - 8 - int.from_bytes(blob[:8], "little")


# ----- bytes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wire_dtype", "expected"),
    [("float32", 4 * 248), ("bfloat16", 2 * 248), ("nf4", (50 + 8) + (11 + 4) + (64 + 8))],
)
def test_bytes_by_hand(wire_dtype: WireDtype, expected: int) -> None:
    blob, _ = pack_adapters(tensors_of(), wire_dtype)
    assert data_bytes(blob) == expected
    assert sum(spec.num_bytes for spec in wire_specs(SHAPES, wire_dtype).values()) == expected


@settings(deadline=None)
@given(
    st.sampled_from(PAYLOADS),
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=4),
)
def test_packed_tensors_follow_contract(
    wire_dtype: WireDtype, sizes: list[tuple[int, int]]
) -> None:
    """A tensor of n elements takes 4 n, 2 n, or ceil(n / 2) + 4 ceil(n / 64) bytes."""
    shapes = {f"matrix{place}.lora_a": shape for place, shape in enumerate(sizes)}
    blob, _ = pack_adapters(tensors_of(shapes=shapes), wire_dtype)
    assert tensor_specs(blob) == wire_specs(shapes, wire_dtype)
    numbers = [rows * columns for rows, columns in sizes]
    per_tensor = {
        "float32": [4 * n for n in numbers],
        "bfloat16": [2 * n for n in numbers],
        "nf4": [(n + 1) // 2 + 4 * ((n + 63) // 64) for n in numbers],
    }
    assert data_bytes(blob) == sum(per_tensor[wire_dtype])


# ----- round trips --------------------------------------------------------------------------------


def test_float32_travels_as_it_is() -> None:
    before = tensors_of()
    blob, lost = pack_adapters(before, "float32")
    after = unpack_adapters(SHAPES, blob, "float32")
    assert lost == {}
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_bfloat16_rounds_to_the_nearest() -> None:
    blob, lost = pack_adapters(tensors_of(), "bfloat16")
    after = unpack_adapters(SHAPES, blob, "bfloat16")
    for name, value in tensors_of().items():
        assert after[name].dtype == torch.float32
        assert torch.equal(after[name], value.to(torch.bfloat16).float())
        assert torch.equal(lost[name], value - after[name])
        assert ((after[name] - value).abs() <= 2**-8 * value.abs()).all()


def test_nf4_by_hand() -> None:
    """Doubled levels come back exactly; other values are rounded to the nearest level."""
    levels = 2 * torch.tensor([LEVELS])
    blob, lost = pack_adapters({"a": levels}, "nf4")
    assert torch.equal(unpack_adapters({"a": (1, 16)}, blob, "nf4")["a"], levels)
    assert not lost["a"].any()
    assert load(blob)["a.codes"].tolist() == [0x01, 0x23, 0x45, 0x67, 0x89, 0xAB, 0xCD, 0xEF]
    assert load(blob)["a.absmax"].tolist() == [2.0]
    blob, lost = pack_adapters({"a": torch.tensor([[1.0, 0.06]])}, "nf4")
    assert unpack_adapters({"a": (1, 2)}, blob, "nf4")["a"].tolist() == [
        [1.0, pytest.approx(LEVELS[8])]
    ]
    assert lost["a"].tolist() == [[0.0, pytest.approx(0.06 - LEVELS[8])]]


@settings(deadline=None)
@given(st.sampled_from(PAYLOADS), st.integers(0, 99), st.floats(1e-6, 1e6))
def test_received_and_lost_sum_to_what_was_sent(
    wire_dtype: WireDtype, seed: int, scale: float
) -> None:
    before = tensors_of(seed, scale)
    owed = tensors_of(seed + 1, 0.01 * scale)
    blob, lost = pack_adapters(before, wire_dtype, owed)
    after = unpack_adapters(SHAPES, blob, wire_dtype)
    for name, value in before.items():
        sent = value if wire_dtype == "float32" else value + owed[name]
        torch.testing.assert_close(
            after[name] + lost.get(name, 0), sent, rtol=1e-5, atol=1e-5 * scale
        )
    assert set(after) == set(SHAPES)


def test_packing_accepts_slices_and_changes_none() -> None:
    whole = torch.arange(24.0).reshape(4, 6).requires_grad_()
    blob, _ = pack_adapters({"b": whole[:, :2], "a": whole[:2]}, "float32")
    after = unpack_adapters({"a": (2, 6), "b": (4, 2)}, blob, "float32")
    assert after["b"].tolist() == [[0, 1], [6, 7], [12, 13], [18, 19]]
    assert after["a"].tolist() == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]


# ----- error feedback -----------------------------------------------------------------------------


@pytest.mark.parametrize(("wire_dtype", "coarse"), [("bfloat16", 1e-4), ("nf4", 1e-2)])
def test_feedback_mean_converges_over_rounds(wire_dtype: WireDtype, coarse: float) -> None:
    """The mean error falls like 1 / rounds with feedback and stays constant without it.

    The same values are packed in every round.
    """
    meant = tensors_of(3)
    errors = {}
    for rounds in (1, 10, 100):
        for feedback in (False, True):
            owed: dict[str, Tensor] = {}
            total = {
                name: torch.zeros_like(value, dtype=torch.float64) for name, value in meant.items()
            }
            for _ in range(rounds):
                blob, lost = pack_adapters(meant, wire_dtype, owed if feedback else None)
                owed = lost
                for name, value in unpack_adapters(SHAPES, blob, wire_dtype).items():
                    total[name] += value
            error = [
                (total[name] / rounds - value).abs().mean().item() for name, value in meant.items()
            ]
            errors[rounds, feedback] = sum(error)
    assert errors[1, True] == errors[1, False] > coarse
    assert errors[100, False] == pytest.approx(errors[1, False])
    assert errors[10, True] < 0.3 * errors[1, True]
    assert errors[100, True] < 0.03 * errors[1, True]


def test_what_is_owed_follows_a_rank_that_changes() -> None:
    """Errors of removed rows of A are dropped; new rows start without an error."""
    value = torch.zeros(2, 3)
    owed = torch.arange(1.0, 13.0).reshape(4, 3)
    blob, _ = pack_adapters({"a": value}, "bfloat16", {"a": owed})
    assert unpack_adapters({"a": (2, 3)}, blob, "bfloat16")["a"].tolist() == [[1, 2, 3], [4, 5, 6]]
    blob, _ = pack_adapters({"a": torch.zeros(3, 4)}, "bfloat16", {"a": owed[:2]})
    assert unpack_adapters({"a": (3, 4)}, blob, "bfloat16")["a"].tolist() == [
        [1, 2, 3, 0],
        [4, 5, 6, 0],
        [0, 0, 0, 0],
    ]


def test_what_is_owed_to_others_is_not_paid_here() -> None:
    blob, _ = pack_adapters({"a": torch.ones(1, 2)}, "bfloat16", {"b": torch.ones(1, 2)})
    assert unpack_adapters({"a": (1, 2)}, blob, "bfloat16")["a"].tolist() == [[1, 1]]


# ----- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize("wire_dtype", PAYLOADS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_numbers_are_not_packed(wire_dtype: WireDtype, bad: float) -> None:
    tensors = tensors_of()
    tensors["attn.q.lora_b"][2, 1] = bad
    with pytest.raises(
        EspalierError,
        match=r"attn.q.lora_b: training led to numbers that are not finite; lower training",
    ):
        pack_adapters(tensors, wire_dtype)


def test_a_number_beyond_bfloat16_is_not_packed() -> None:
    with pytest.raises(EspalierError, match="not finite"):
        pack_adapters({"a": torch.tensor([[3.4e38]])}, "bfloat16")


@pytest.mark.parametrize("wire_dtype", ["float32", "bfloat16"])
def test_non_finite_numbers_are_not_unpacked(wire_dtype: WireDtype) -> None:
    tensors = load(pack_adapters(tensors_of(), wire_dtype)[0])
    tensors["mlp.up.lora_a"][0, 5] = float("-inf")
    with pytest.raises(EspalierError, match=r"mlp.up.lora_a: a number is not finite"):
        unpack_adapters(SHAPES, save(tensors), wire_dtype)


@pytest.mark.parametrize("wire_dtype", PAYLOADS)
def test_another_shape_is_refused_in_words(wire_dtype: WireDtype) -> None:
    blob, _ = pack_adapters({"a": torch.zeros(4, 5)}, wire_dtype)
    with pytest.raises(
        EspalierError,
        match=r"a: (is \[4, 5\], must be \[4, 6\]|the codes of 24 values in NF4 are 12)",
    ):
        unpack_adapters({"a": (4, 6)}, blob, wire_dtype)


def _negative(tensors: dict[str, Tensor]) -> None:
    tensors["attn.q.lora_a.absmax"][1] = -1.0


def _not_a_number(tensors: dict[str, Tensor]) -> None:
    tensors["attn.q.lora_a.absmax"][0] = float("nan")


def _unused_bits(tensors: dict[str, Tensor]) -> None:
    """Change the lower half of the last byte of 99 codes, which must be 0."""
    tensors["attn.q.lora_a.codes"][-1] ^= 1


def _one_code_less(tensors: dict[str, Tensor]) -> None:
    tensors["attn.q.lora_a.codes"] = tensors["attn.q.lora_a.codes"][:-1].clone()


def _float_codes(tensors: dict[str, Tensor]) -> None:
    tensors["attn.q.lora_a.codes"] = tensors["attn.q.lora_a.codes"].float()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_negative, "a magnitude of an NF4 block is negative, NaN or infinite"),
        (_not_a_number, "a magnitude of an NF4 block is negative, NaN or infinite"),
        (_unused_bits, "the unused bits of the last NF4 byte"),
        (_one_code_less, "the codes of 99 values in NF4 are 50"),
        (_float_codes, "the codes of 99 values in NF4 are 50 of torch.uint8"),
    ],
)
def test_damaged_nf4_is_refused_in_words(damage: Any, words: str) -> None:
    tensors = load(pack_adapters(tensors_of(), "nf4")[0])
    damage(tensors)
    with pytest.raises(EspalierError, match=f"attn.q.lora_a: {words}"):
        unpack_adapters(SHAPES, save(tensors), "nf4")
