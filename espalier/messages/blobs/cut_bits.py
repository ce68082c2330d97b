"""Structured cuts as one blob for the whole model: a bit per prunable group.

The order of the bits is that of ``Groups``. Cuts are final: a group that is cut stays cut.
"""

import numpy as np

from espalier.errors import ProtocolError
from espalier.messages.tensor_blobs import TensorSpec, pack_tensors, tensor_specs, views
from espalier.models.groups import Cut, Groups
from espalier.models.structure import GROUP_KINDS
from espalier.settings.pruning import CutSettings
from pruning_kernels.votes.bitmask import has_clean_padding, num_words, pack, unpack

CUT_BITS = "groups.cut"
"""Name of the tensor with the bits: 1 = cut."""


def bit_specs(groups: Groups) -> dict[str, TensorSpec]:
    """Return the specs of the tensors of a blob."""
    return {CUT_BITS: TensorSpec("U64", (num_words(len(groups.costs)),))}


def pack_bits(cut: Cut) -> bytes:
    """Serialize a cut as a blob."""
    return pack_tensors({CUT_BITS: pack(cut)})


def read_bits(groups: Groups, blob: bytes) -> Cut:
    """Read a cut from a blob.

    Raises ProtocolError if the blob is not a bit vector of this model, or if it cuts all groups or
    all channels of a block.
    """
    if tensor_specs(blob) != bit_specs(groups):
        raise ProtocolError(
            f"{CUT_BITS}: these are not the bits of this model's {len(groups.costs)}"
            " groups and channels"
        )
    words = views(blob)[CUT_BITS]
    if not has_clean_padding(words, len(groups.costs)):
        raise ProtocolError(f"{CUT_BITS}: bits are set beyond the last group")
    cut = unpack(words, groups.costs.shape)
    num_kept = groups.stay(cut)
    if not num_kept.all():
        empty = int(np.flatnonzero(num_kept == 0)[0])
        raise ProtocolError(
            f"{CUT_BITS}: all {GROUP_KINDS[empty % 2]} of block {empty // 2} are cut, one must stay"
        )
    return cut


def require_step(groups: Groups, before: Cut, after: Cut, ratio: float, job: CutSettings) -> None:
    """Check that a round cuts the requested ratio and exceeds it by less than one group.

    The cut may also be unchanged, since a client that lost its importance scores cuts nothing. With
    ``channel-multiple`` the number of remaining channels of each block is a multiple, so the cut
    may miss the ratio by up to ``channel-multiple - 1`` channels in each block. Raises
    ProtocolError if a cut group came back, or if the cut is too small or too large.

    Parameters
    ----------
    before : cut before the round
    after : cut after the round
    ratio : requested pruning ratio
    job : settings of the cut
    """
    # Cuts are final: adapters of removed rows do not exist any more.
    if (before & ~after).any():
        raise ProtocolError(f"{CUT_BITS}: groups that were removed earlier are present again")
    # A client that lost its importance scores cuts nothing.
    if np.array_equal(before, after):
        return
    for pools, target in groups.targets(ratio, job.selection):
        # The cut of each competition, and what a multiple of channels may add to it.
        spent = groups.spent(after, pools)
        room = groups.room(pools, job)
        if spent < target - room:
            raise ProtocolError(f"{CUT_BITS}: the pruning ratio is below the requested one")
        pool = groups.span(pools)
        # The order of removal is unknown, so the largest new group counts as the last one.
        last = int(groups.costs[pool][after[pool] & ~before[pool]].max(initial=0))
        if last and spent - last >= target + room:
            raise ProtocolError(
                f"{CUT_BITS}: the pruning ratio is above the requested one, by a group or more"
            )
    # Channels are every second pool.
    channels = groups.stay(after)[1::2]
    uneven = (channels % job.channel_multiple != 0) & (channels < groups.counts[1::2])
    if uneven.any():
        raise ProtocolError(
            f"{CUT_BITS}: the channels that stay in block {int(uneven.argmax())} are not a multiple"
            f" of {job.channel_multiple}, which is the run's channel-multiple"
        )
