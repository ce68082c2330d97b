"""The Triton kernel against unpacked sums, on a CUDA device or in Triton's interpreter."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from pruning_kernels.votes.bitmask import pack
from pruning_kernels.votes.vote_counter import vote_counter
from pruning_kernels.votes.votes import magnitudes
from tests.devices import CPU, CUDA, NEEDS_CUDA

ROOT = Path(__file__).parents[3]
NEEDS_TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
NO_CUDA = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the kernel itself runs on the CUDA device"
)
CASES = [(1, 1), (2, 3), (3, 256), (7, 9), (8, 257), (9, 70), (64, 300), (300, 5)]
"""Numbers of voters and words: full and partial groups of eight voters and tiles of words."""


def unpacked(words: np.ndarray) -> np.ndarray:
    """Return the bits of words, int64."""
    return np.unpackbits(words.view(np.uint8)).astype(np.int64)


def require_sums(device: torch.device) -> None:
    """Count random masks into part of the planes; the rest of the planes must stay unchanged."""
    from pruning_kernels.votes.vote_planes_cuda import count_votes

    for voters, words in CASES:
        masks = np.random.default_rng(voters).integers(0, 2**64, (voters, words), dtype=np.uint64)
        planes = torch.full((voters.bit_length(), words + 4), -1, device=device)
        count_votes(torch.from_numpy(masks.view(np.int64)).to(device), planes[:, 2:-2])
        bits = [
            np.unpackbits(plane.view(np.uint8)).astype(int) << bit
            for bit, plane in enumerate(planes[:, 2:-2].cpu().numpy())
        ]
        assert (
            sum(bits) == sum(np.unpackbits(mask.view(np.uint8)).astype(int) for mask in masks)
        ).all()
        assert (planes[:, :2] == -1).all()
        assert (planes[:, -2:] == -1).all()


@NEEDS_TRITON
def test_kernel_counts_equal_unpacked_sums() -> None:
    if torch.cuda.is_available():
        require_sums(CUDA)
        return
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, __file__], env=environment, check=True, capture_output=True)


@NEEDS_TRITON
@NO_CUDA
@pytest.mark.parametrize("ones", [(), ("voters",), ("words", "stride")])
@pytest.mark.parametrize(("num_planes", "capability"), [(1, 80), (4, 80), (10, 80), (7, 90)])
def test_the_kernel_compiles_without_a_device(
    num_planes: int, capability: int, ones: tuple[str, ...]
) -> None:
    """Compute capabilities 8.0 and 9.0; Triton turns arguments that are 1 into constants."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from pruning_kernels.votes.vote_planes_cuda import TILE, WARPS, _count_tile

    constants = {"num_planes": num_planes, "tile": TILE} | dict.fromkeys(ones, 1)
    names = {"masks": "*i64", "planes": "*i64", "voters": "i32", "words": "i32", "stride": "i32"}
    source = ASTSource(_count_tile, names | dict.fromkeys(constants, "constexpr"), constants)
    made = triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={"num_warps": WARPS}
    )
    assert "ld.local" not in made.asm["ptx"]


@NEEDS_CUDA
@pytest.mark.parametrize("shape", [(1300, 1000), (7, 33)])
def test_cuda_counter_has_the_bits_of_the_cpu(
    shape: tuple[int, int],
) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = magnitudes(torch.randn(shape, generator=generator).to(torch.bfloat16))
    counters = [vote_counter(shape, 20), vote_counter(shape, 20, CUDA)]
    votes = np.stack(
        [pack((torch.rand(shape, generator=generator) < 0.4).numpy()) for _ in range(20)]
    )
    for counter in counters:
        counter.count(votes)
    assert len({counter.counts().tobytes() for counter in counters}) == 1
    assert len({counter.unanimous().tobytes() for counter in counters}) == 1
    for group in ("layer", "row", "column", f"5:{shape[1]}"):
        assert len({counter.most_voted(0.5, group, sizes).tobytes() for counter in counters}) == 1


if __name__ == "__main__":
    require_sums(CPU)
