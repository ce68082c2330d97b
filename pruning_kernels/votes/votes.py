"""Votes of the clients, and selection of the most voted weights (FedPrLLM steps 3 and 4).

Two implementations have the same bits: torch on any device, and for large matrices on the CPU the
compiled kernels of ``compiled_votes``.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pruning_kernels.compiled import WORTH_COMPILING
from pruning_kernels.selection.comparison_groups import (
    ComparisonGroup,
    group_size,
    pruned_per_group,
)
from pruning_kernels.selection.lowest_on_device import prune_lowest
from pruning_kernels.votes.bitmask import Words, num_words, pack
from pruning_kernels.votes.bitmask_on_device import pack_on_device

Sizes = NDArray[np.unsignedinteger]
"""Tie-breakers among equally voted weights: uint16 or uint32, the smaller goes first.

The upper bit is ignored, so that the bits of a float count as its magnitude.
"""


def magnitudes(weight: Tensor) -> Sizes:
    """Return the weights' bits as sizes, same shape; 16- and 32-bit floats are not copied."""
    if weight.element_size() not in (2, 4):
        weight = weight.to(torch.float32)
    integers = (
        weight.contiguous().view(torch.int16 if weight.element_size() == 2 else torch.int32).numpy()
    )
    return integers.view(np.uint16 if integers.itemsize == 2 else np.uint32)


CPU = torch.device("cpu")


def vote_counter(
    shape: tuple[int, int], num_voters: int, device: torch.device = CPU
) -> "VoteCounter":
    """Return a counter without votes, which counts on a device."""
    if device.type == "cpu" and shape[0] * shape[1] >= WORTH_COMPILING:
        from pruning_kernels.votes.compiled_votes import MAX_VOTERS, CompiledVotes

        if num_voters <= MAX_VOTERS:
            return CompiledVotes(shape, num_voters)
    return VoteCounter(shape, num_voters, device)


class VoteCounter:
    """Votes for one matrix, as bit planes on a device; inputs and results are NumPy arrays.

    Plane ``p`` has bit ``i`` set if the number of votes for weight ``i`` has bit ``p`` set. Masks
    are added as whole words, without unpacking. The planes need ``log2(voters) + 1`` bits per
    weight, for any number of voters.
    """

    planes: Any
    """(bits of the number of voters, words); here int64 tensors."""

    def __init__(self, shape: tuple[int, int], num_voters: int, device: torch.device = CPU) -> None:
        self.shape = shape
        self.num_voters = num_voters
        self.num_weights = shape[0] * shape[1]
        self.device = device
        self._make_planes(max(1, num_voters.bit_length()), num_words(self.num_weights))

    def _make_planes(self, planes: int, words: int) -> None:
        self.planes = torch.zeros((planes, words), dtype=torch.int64, device=self.device)

    def count(self, masks: NDArray[np.uint64], first: int = 0) -> None:
        """Count the votes of all voters in a range of words.

        Parameters
        ----------
        masks : (num_voters, words), packed prune masks, starting at word ``first``; counting is
            fastest in a ``bitmask.stack_of_masks``

        Raises
        ------
        ValueError
            There are more words, or another number of voters.
        """
        voters, words = masks.shape
        if voters != self.num_voters or first + words > self.planes.shape[1]:
            raise ValueError(
                f"expected {self.num_voters} masks of {self.planes.shape[1]} words, got"
                f" {masks.shape} at {first}"
            )
        self._count(masks, first)

    def _count(self, masks: NDArray[np.uint64], first: int) -> None:
        given = torch.from_numpy(np.ascontiguousarray(masks).view(np.int64)).to(self.device)
        stretch = self.planes[:, first : first + masks.shape[1]]
        stretch.zero_()
        for voter, mask in enumerate(given, 1):
            carry = mask
            # Upper planes are still empty.
            for plane in stretch[: voter.bit_length()]:
                both = plane & carry
                plane.bitwise_xor_(carry)
                carry = both

    def take_counts(self, counts: NDArray[np.unsignedinteger]) -> None:
        """Set the votes per weight, (num_weights,), from a sum of votes.

        A count above the number of voters, which no honest client causes, is unanimous.
        """
        votes = np.minimum(counts, self.num_voters)
        for bit in range(len(self.planes)):
            self._set_plane(bit, pack((votes >> votes.dtype.type(bit) & 1).astype(np.bool_)))

    def _set_plane(self, bit: int, words: Words) -> None:
        self.planes[bit] = torch.from_numpy(words.view(np.int64))

    def trim(self, trim: int) -> None:
        """Leave out the ``trim`` smallest and largest votes of each weight, after counting.

        Votes are 0 or 1, so of v votes of n clients ``min(max(v - trim, 0), n - 2 trim)`` remain,
        of n - 2 trim voters. This is the trimmed mean of ``trimmed_mean``, times the number of
        voters. A weight that only ``trim`` clients or fewer would prune gains nothing by their
        votes, and one that only so many would keep is as if all would prune it.

        Raises
        ------
        ValueError
            ``trim`` is negative or leaves no voter.
        """
        remaining = self.num_voters - 2 * trim
        if trim < 0 or remaining < 1:
            raise ValueError(f"{trim} of {self.num_voters} votes cannot be left out at each end")
        if not trim:
            return
        # Subtract ``trim`` in bit planes; a borrow at the end marks weights with fewer votes.
        borrow = self.planes[0] ^ self.planes[0]
        zeros = borrow
        for bit, plane in enumerate(self.planes):
            taken = ~zeros if trim >> bit & 1 else zeros
            less = plane ^ taken ^ borrow
            borrow = (~plane & (taken | borrow)) | (taken & borrow)
            plane[:] = less
        for plane in self.planes:
            plane[:] = plane & ~borrow
        # ``equal`` and ``above`` compare with ``remaining``, from the highest plane downward.
        equal = ~zeros
        above = zeros
        for bit in reversed(range(len(self.planes))):
            plane = self.planes[bit]
            if remaining >> bit & 1:
                equal = equal & plane
            else:
                above = above | (equal & plane)
                equal = equal & ~plane
        for bit, plane in enumerate(self.planes):
            plane[:] = (plane | above) if remaining >> bit & 1 else (plane & ~above)
        self.num_voters = remaining

    def counts(self) -> NDArray[np.int32]:
        """Return the votes per weight, shaped like the matrix (FedPrLLM's summed masks)."""
        return self._counts().cpu().numpy()

    def unanimous(self) -> Words:
        """Return the packed mask of the weights that every voter would prune."""
        all_of_them = ~(self.planes[0] ^ self.planes[0])
        for bit, plane in enumerate(self.planes):
            all_of_them &= plane if self.num_voters >> bit & 1 else ~plane
        words = self._on_host(all_of_them)
        if self.num_weights % 64:
            words[-1] &= np.uint64((1 << self.num_weights % 64) - 1)
        return words

    def _on_host(self, words: Any) -> Words:
        """Return words of the planes' device in CPU memory."""
        return words.cpu().numpy().view(np.uint64)

    def most_voted(
        self, sparsity: float, group: ComparisonGroup, sizes: Sizes | None = None
    ) -> Words:
        """Return the packed mask of the most voted weights of each comparison group.

        This is the top-k of the summed masks in FedPrLLM section 3.2. Each group loses exactly
        ``pruned_per_group`` weights.

        Parameters
        ----------
        sparsity : fraction of each group to prune, in [0, 1)
        group : see ``ComparisonGroup``
        sizes : (rows, columns) or None. Of weights with equally many votes the one with the smaller
            size is pruned first, then the one with the lower index. With None only the index
            decides. The reference code uses a random permutation, which random sizes reproduce with
            a seed.
        """
        rows, columns = self.shape
        quota = pruned_per_group(self.shape, sparsity, group)
        keys, bits = self._keys(sizes)
        lines = (keys.T if group == "column" else keys).reshape(-1, group_size(self.shape, group))
        prune_mask = prune_lowest(lines, quota, bits)
        return pack_on_device(
            prune_mask.reshape(columns, rows).T if group == "column" else prune_mask
        )

    def _counts(self) -> Tensor:
        """Return the votes per weight, shaped like the matrix, int32."""
        counts = torch.zeros(self.planes.shape[1] * 64, dtype=torch.int32, device=self.device)
        places = torch.arange(8, dtype=torch.uint8, device=self.device)
        for bit, plane in enumerate(self.planes):
            # Shape (bytes, 8).
            bits = plane.view(torch.uint8)[:, None] >> places & 1
            counts.add_(bits.reshape(-1), alpha=1 << bit)
        return counts[: self.num_weights].reshape(self.shape)

    def _keys(self, sizes: Sizes | None) -> tuple[Tensor, int]:
        """Return keys, (rows, columns), of which the lowest are pruned, and their number of bits.

        A key consists of the missing votes, followed by the size without its upper bit. Keys are
        int32 if they fit, as with the sizes of 16-bit weights and fewer than 65,536 voters.
        """
        missed = self._counts().neg_().add_(self.num_voters)
        bits = self.num_voters.bit_length()
        if sizes is None:
            return missed, bits
        size_bits = 8 * sizes.itemsize - 1
        signed = torch.from_numpy(sizes.view(f"i{sizes.itemsize}")).to(self.device)
        dtype = torch.int32 if bits + size_bits < 32 else torch.int64
        keys = missed.to(dtype).bitwise_left_shift_(size_bits)
        keys.bitwise_or_(signed.to(dtype).bitwise_and_((1 << size_bits) - 1))
        return keys, bits + size_bits
