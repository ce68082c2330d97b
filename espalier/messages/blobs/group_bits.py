"""Bit vector of the prunable groups that are cut from a model, and checks of its changes.

The order of the bits is that of ``Groups``. Cuts are final: a group that is cut stays cut.
"""

import numpy as np

from espalier.errors import ProtocolError
from espalier.messages.tensor_blobs import TensorSpec, pack_tensors, tensor_specs, views
from espalier.models.groups import Cut, Groups
from espalier.models.structure import GROUP_KINDS
from espalier.settings.structured import CutSettings
from pruning_kernels.votes.bitmask import has_clean_padding, num_words, pack, unpack

CUT = "units.cut"
"""Name of the tensor with the bits: 1 = cut."""


def bit_specs(groups: Groups) -> dict[str, TensorSpec]:
    """Return the specs of the tensors of a blob."""
    return {CUT: TensorSpec("U64", (num_words(len(groups.costs)),))}


def pack_bits(cut: Cut) -> bytes:
    """Serialize a cut as a blob."""
    return pack_tensors({CUT: pack(cut)})


def read_bits(groups: Groups, blob: bytes) -> Cut:
    """Read a cut from a blob.

    Raises
    ------
    ProtocolError
        If the blob is not a bit vector of this model, or if it cuts all groups or all channels of a
        block.
    """
    if tensor_specs(blob) != bit_specs(groups):
        raise ProtocolError(
            f"{CUT}: these are not the bits of this model's {len(groups.costs)} groups and channels"
        )
    words = views(blob)[CUT]
    if not has_clean_padding(words, len(groups.costs)):
        raise ProtocolError(f"{CUT}: bits are set beyond the last group")
    cut = unpack(words, groups.costs.shape)
    stay = groups.stay(cut)
    if not stay.all():
        empty = int(np.flatnonzero(stay == 0)[0])
        raise ProtocolError(
            f"{CUT}: all {GROUP_KINDS[empty % 2]} of block {empty // 2} are cut, one must stay"
        )
    return cut


def require_step(groups: Groups, before: Cut, after: Cut, share: float, job: CutSettings) -> None:
    """Check that a round cuts the requested ratio and exceeds it by less than one group.

    The cut may also be unchanged, since a client that lost its importance scores cuts nothing. With
    ``channel-multiple`` the number of remaining channels of each block is a multiple, so the cut
    may miss the ratio by up to ``channel-multiple - 1`` channels in each block.

    Parameters
    ----------
    groups
        Prunable groups of the model.
    before
        Cut before the round.
    after
        Cut after the round.
    share
        Requested pruning ratio.
    job
        Settings of the cut.

    Raises
    ------
    ProtocolError
        If a cut group came back, or if the cut is too small or too large.
    """
    if (before & ~after).any():
        raise ProtocolError(f"{CUT}: groups that were cut before have come back")
    # A client that lost its importance scores cuts nothing.
    if np.array_equal(before, after):
        return
    for pools, target in groups.targets(share, job.selection):
        spent = groups.spent(after, pools)
        room = groups.room(pools, job)
        if spent < target - room:
            raise ProtocolError(f"{CUT}: less is cut than the share that was asked for")
        own = groups.span(pools)
        # The order of removal is unknown, so the largest new group counts as the last one.
        last = int(groups.costs[own][after[own] & ~before[own]].max(initial=0))
        if last and spent - last >= target + room:
            raise ProtocolError(
                f"{CUT}: more is cut than the share that was asked for, by a group or more"
            )
    channels = groups.stay(after)[1::2]
    uneven = (channels % job.channel_multiple != 0) & (channels < groups.counts[1::2])
    if uneven.any():
        raise ProtocolError(
            f"{CUT}: the channels that stay in block {int(uneven.argmax())} are not a multiple of"
            f" {job.channel_multiple}, which is the run's channel-multiple"
        )
