"""FedSODA's costs as formulas: numbers that are trained and sent, operations, bytes (section 5, appendix C). Pure functions.

Symbols: ``u`` numbers of a layer's LoRA adapters, L layers, L_A of them the adapter, n layers pruned in each of p groups,
r_int rounds between alignments; m^G, m^L, m^A, m^S are section 5's numbers of layers of the full model, the sub-model, the
adapter, and the aligned ones. An operation is a multiplication or an addition.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

HALF_BYTE = 0.5
"""Of a number in four bits, as the paper counts: without scales."""
MIB = 1 << 20
GIB = 1 << 30


# ----- trained and sent numbers -------------------------------------------------------------------


def lora_numbers(linears: Mapping[str, tuple[int, int]], rank: int, targets: Iterable[str]) -> int:
    """``u``: r (in + out), summed over a layer's adapted matrices (section 3.1: A is r x k, B is d x r)."""
    return rank * sum(sum(linears[name]) for name in targets)


def kept_layers(layers: int, pruned: int, groups: int) -> int:
    """Layers of the sub-model, L - n p (section 4.2)."""
    return layers - pruned * groups


def fedpetuning_round(u: int, layers: int) -> int:
    """Numbers of a round: all adapters up and down."""
    return 2 * layers * u


def fedot_round(u: int, adapter: int) -> int:
    """Numbers of a round: the adapter layers' up and down."""
    return 2 * adapter * u


def fedbiot_round(u: int, adapter: int, emulator: int) -> int:
    """Numbers of a round: the adapter layers' up and down, and those of all emulator layers down (section 6.1.3)."""
    return (2 * adapter + emulator) * u


def fedsoda_round(u: float, adapter: int, groups: int, interval: int) -> float:
    """Mean of a round: the adapter layers' up and down, and every r_int rounds those of p aligned layers down (section 4.3)."""
    return (2 * adapter + groups / interval) * u


def four_bit_megabytes(numbers: float) -> float:
    """MB of Tables 4, 7 and 8: half a byte a number, 2^20 bytes."""
    return numbers * HALF_BYTE / MIB


def full_communication(tokens: int, hidden: int, layers: int, vocabulary: int) -> int:
    """Order of what sending everything takes: S d + m^b d^2 + V d (section 5.2)."""
    return tokens * hidden + layers * hidden**2 + vocabulary * hidden


def lora_communication(aligned: int, adapter: int, rank: int, hidden: int) -> int:
    """Order of what FedSODA sends: (m^S + m^A) r d (section 5.2).

    The section leaves m^S where nothing is aligned; it is m^A that is left, for only the adapter's numbers travel then.
    """
    return (aligned + adapter) * rank * hidden


# ----- operations ---------------------------------------------------------------------------------


def computation_share(full: int, kept: int, adapter: int) -> float:
    """FedSODA's operations over those of full training: (m^L + m^A) / 2 m^G (section 5.1).

    All layers cost the same, S d^2 + S^2 d, forward as backward, so that nothing else is left.
    """
    return (kept + adapter) / (2 * full)


def layer_operations(linears: Mapping[str, tuple[int, int]], tokens: int) -> int:
    """A layer's forward pass over S tokens: 2 S for each weight, and 4 S^2 w for scores and mixtures over w query features.

    Causal masks are not made use of; norms, activations and softmax are left out (section 5.1, "Add&Norm").
    """
    weights = sum(math.prod(shape) for shape in linears.values())
    return 2 * tokens * weights + 4 * tokens**2 * linears["attn.q"][0]


@dataclass(frozen=True)
class Step:
    """What one sequence costs in one training step; all are operations."""

    forward: int
    backward: int

    @property
    def total(self) -> int:
        """Both passes."""
        return self.forward + self.backward


def lora_step(layer: int, lora: int, head: int, layers: int, adapted: int, trained: int) -> Step:
    """A step that trains the adapters of the last ``trained`` of ``layers`` layers (section 5.1, with real shapes).

    Backward, frozen matrices take as much as forward (the gradient of their inputs), trained ones twice as much. The lowest
    layer is counted whole, although nothing below needs its inputs' gradient.

    Parameters
    ----------
    layer, lora, head : operations of a forward pass through a layer, its adapters, the language-model head
    adapted : layers that have adapters, trained or not
    """
    return Step(layers * layer + adapted * lora + head, trained * (layer + 2 * lora) + head)


def full_step(layer: int, head: int, layers: int) -> Step:
    """A step that trains all matrices: the gradients of inputs and of weights, each as much as the forward pass."""
    forward = layers * layer + head
    return Step(forward, 2 * forward)


# ----- storage ------------------------------------------------------------------------------------


def float32_bytes(parameters: int) -> int:
    """4 P (appendix C)."""
    return 4 * parameters


def nf4_bytes(parameters: int) -> float:
    """P / 2, without constants (appendix C)."""
    return parameters * HALF_BYTE


def constant_bits(block: int = 64, nested_block: int = 0) -> float:
    """Bits of the constants per parameter (appendix C).

    Without double quantisation (``nested_block`` 0) 32 / block; with it 8 / block + 32 / (block nested_block).
    """
    return 8 / block + 32 / (block * nested_block) if nested_block else 32 / block


def agrees(printed: str, computed: float, decimals: int) -> bool:
    """Whether a number rounds to the printed one, a tie to either side."""
    return abs(float(printed) - computed) <= 0.5 * 10.0**-decimals + 1e-9
