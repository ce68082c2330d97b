"""FedSODA's costs as formulas: trained and sent numbers, operations, bytes (section 5, appendix C).

All functions are pure. Symbols: ``u`` is the number of parameters in a layer's LoRA adapters, L the
number of layers, L_A that of the adapter, n the number of layers pruned in each of p groups, and
r_int the number of rounds between alignments. m^G, m^L, m^A, m^S are section 5's numbers of layers
of the full model, the sub-model, the adapter, and the aligned ones. An operation is a
multiplication or an addition.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

HALF_BYTE = 0.5
"""Bytes of a 4-bit number; as in the paper, scales do not count."""
MIB = 1 << 20
GIB = 1 << 30


# ----- trained and sent numbers -------------------------------------------------------------------


def lora_numbers(linears: Mapping[str, tuple[int, int]], rank: int, targets: Iterable[str]) -> int:
    """Return ``u``: r (in + out), summed over a layer's adapted matrices.

    Section 3.1: A is r x k, B is d x r.
    """
    return rank * sum(sum(linears[name]) for name in targets)


def kept_layers(layers: int, pruned: int, groups: int) -> int:
    """Return the number of layers of the sub-model, L - n p (section 4.2)."""
    return layers - pruned * groups


def fedpetuning_round(u: int, layers: int) -> int:
    """Return the numbers sent in a round: all adapters up and down."""
    return 2 * layers * u


def fedot_round(u: int, adapter: int) -> int:
    """Return the numbers sent in a round: those of the adapter layers up and down."""
    return 2 * adapter * u


def fedbiot_round(u: int, adapter: int, emulator: int) -> int:
    """Return the numbers sent in a round (section 6.1.3).

    They are those of the adapter layers up and down, and of all emulator layers down.
    """
    return (2 * adapter + emulator) * u


def fedsoda_round(u: float, adapter: int, groups: int, interval: int) -> float:
    """Return the mean of the numbers sent in a round (section 4.3).

    They are those of the adapter layers up and down, and every r_int rounds those of p aligned
    layers down.
    """
    return (2 * adapter + groups / interval) * u


def four_bit_megabytes(numbers: float) -> float:
    """Return MB as in Tables 4, 7 and 8: half a byte per number, 2^20 bytes per MB."""
    return numbers * HALF_BYTE / MIB


def full_communication(tokens: int, hidden: int, layers: int, vocabulary: int) -> int:
    """Return the order of sending everything: S d + m^b d^2 + V d (section 5.2)."""
    return tokens * hidden + layers * hidden**2 + vocabulary * hidden


def lora_communication(aligned: int, adapter: int, rank: int, hidden: int) -> int:
    """Return the order of what FedSODA sends: (m^S + m^A) r d (section 5.2).

    The section prints m^S for rounds without alignment. It must be m^A, because only the adapter is
    sent then.
    """
    return (aligned + adapter) * rank * hidden


# ----- operations ---------------------------------------------------------------------------------


def computation_share(full: int, kept: int, adapter: int) -> float:
    """Return FedSODA's operations relative to full training: (m^L + m^A) / 2 m^G (section 5.1).

    All layers cost the same, S d^2 + S^2 d, forward and backward, so only the numbers of layers
    remain.
    """
    return (kept + adapter) / (2 * full)


def layer_operations(linears: Mapping[str, tuple[int, int]], tokens: int) -> int:
    """Return the operations of a layer's forward pass over S tokens.

    There are 2 S for each weight, and 4 S^2 w for scores and mixtures with w query features. Causal
    masks do not reduce them. Norms, activations and softmax are left out (section 5.1, "Add&Norm").
    """
    weights = sum(math.prod(shape) for shape in linears.values())
    return 2 * tokens * weights + 4 * tokens**2 * linears["attn.q"][0]


@dataclass(frozen=True)
class Step:
    """Operations of one training step on one sequence."""

    forward: int
    backward: int

    @property
    def total(self) -> int:
        """Operations of both passes."""
        return self.forward + self.backward


def lora_step(layer: int, lora: int, head: int, layers: int, adapted: int, trained: int) -> Step:
    """Return a step that trains the adapters of the last ``trained`` of ``layers`` layers.

    The formulas are those of section 5.1 with real shapes. In the backward pass, frozen matrices
    cost as much as forward (the gradient of their inputs), trained ones twice as much. The lowest
    layer counts fully, although the gradient of its inputs is not needed.

    Parameters
    ----------
    layer, lora, head : operations of a forward pass through a layer, its adapters, and the
        language-model head
    layers : number of layers
    adapted : number of layers with adapters, trained or not
    trained : number of trained layers
    """
    return Step(layers * layer + adapted * lora + head, trained * (layer + 2 * lora) + head)


def full_step(layer: int, head: int, layers: int) -> Step:
    """Return a step that trains all matrices.

    The gradients of inputs and of weights cost as much as the forward pass each.
    """
    forward = layers * layer + head
    return Step(forward, 2 * forward)


# ----- storage ------------------------------------------------------------------------------------


def float32_bytes(parameters: int) -> int:
    """Return 4 P, the bytes in float32 (appendix C)."""
    return 4 * parameters


def nf4_bytes(parameters: int) -> float:
    """Return P / 2, the bytes in NF4 without constants (appendix C)."""
    return parameters * HALF_BYTE


def constant_bits(block: int = 64, nested_block: int = 0) -> float:
    """Return the bits of the constants per parameter (appendix C).

    They are 32 / block without double quantization (``nested_block`` 0), and 8 / block + 32 /
    (block nested_block) with it.
    """
    return 8 / block + 32 / (block * nested_block) if nested_block else 32 / block


def agrees(printed: str, computed: float, decimals: int) -> bool:
    """Return whether a number rounds to the printed one; ties may round either way."""
    return abs(float(printed) - computed) <= 0.5 * 10.0**-decimals + 1e-9
