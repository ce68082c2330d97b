"""Bounds for cuts by FedSpine's devices whose groups compete across kinds or blocks."""

import math

from espalier.methods.tuning.fedspine import FedSpineSettings
from espalier.models.adapters import AdapterPlan
from espalier.models.groups import Cut, Groups
from espalier.models.structure import GROUP_KINDS, group_size, kind_of
from espalier.settings.run import RunSettings
from espalier.settings.tables.federation import WireDtype
from server_app.estimate.messages.dry_run import Case

AROUND_TENSOR = 32
"""Bytes per tensor by which blobs with equally many numbers may differ.

The difference comes from digits in the header and from the last block of NF4.
"""
WIRE_BYTES: dict[WireDtype, float] = {"float32": 4, "bfloat16": 2, "nf4": 0.5625}
"""Bytes per number on the wire."""


def uneven_cut(
    groups: Groups,
    run: RunSettings,
    adapters: AdapterPlan,
    share: float,
    case: Case,
    rank: int,
    around_parts: int = 0,
) -> Cut:
    """Return a bound for cuts with a pruning ratio, if groups of different kinds or blocks compete.

    The pruning ratio counts parameters, but messages contain adapters. All groups of a pool have
    the same number of parameters and of adapter values. ``least`` therefore cuts pools in the order
    of adapter values per parameter, until at least as many parameters are gone as from any device;
    ``most`` cuts in the opposite order, and stops before as many are gone.

    Parameters
    ----------
    rank : lowest rank of adapters
    around_parts : bytes by which messages with equally many numbers may differ, because they have
        more or fewer parts
    """
    job = run.of(FedSpineSettings)
    # Number of adapter values in one group of each pool.
    values = [0] * len(groups.counts)
    for index, adapter in adapters:
        kind, _ = kind_of(adapter.linear.name)
        size = group_size(groups.plan, adapter.linear.name, kind)
        values[2 * index + GROUP_KINDS.index(kind)] += size
    density = [value / cost for value, cost in zip(values, groups.pool_costs.tolist(), strict=True)]
    # Bytes by which messages of equal content may differ, as adapter values per target.
    tensors = sum(1 + 2 * len(block) for block in adapters.blocks.values())
    bytes_around = AROUND_TENSOR * tensors + around_parts
    targets = groups.targets(share, job.selection)
    around = bytes_around / (WIRE_BYTES[run.federation.wire_dtype] * rank * len(targets))
    can_go = (groups.counts - groups.must_stay(job)).tolist()
    cut = groups.none
    for pools, target in targets:
        # This many parameters, more or fewer, have ``around`` adapter values or more.
        slack = groups.room(pools, job) + around / min(density[pool] for pool in pools)
        largest = int(max(groups.pool_costs[pool] for pool in pools))
        # Cut beyond the target for the fewest bytes, and less than it for the most.
        remaining = target + slack + largest if case == "least" else target - slack
        for pool in sorted(pools, key=density.__getitem__, reverse=case == "least"):
            number = remaining / int(groups.pool_costs[pool])
            rounded = math.ceil(number) if case == "least" else math.floor(number)
            gone = max(0, min(can_go[pool], rounded))
            # Groups of a pool are alike, so any of them will do.
            span = groups.span(range(pool, pool + 1))
            cut[span.stop - gone : span.stop] = True
            remaining -= gone * int(groups.pool_costs[pool])
            if gone < can_go[pool]:
                break
    return cut
