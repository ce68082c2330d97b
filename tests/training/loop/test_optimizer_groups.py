"""Parameter groups with their own rates, each trained as by a separate optimiser.

Rates stay within the bounds of ``[training]``.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import permutations

import pytest
import torch

from espalier.errors import EspalierError
from espalier.settings.tables.training import TrainingSettings
from espalier.training.optimizer import Group, grouped
from tests.training.loop.two_tensors import RATE, TOTAL, Rows, loop_of, mean_loss

pytestmark = pytest.mark.usefixtures("tests_on_device")

SCHEDULES: dict[str, Callable[[int], float]] = {
    "constant": lambda step: 1.0,
    "linear": lambda step: 1 - step / TOTAL,
    "cosine": lambda step: (1 + math.cos(math.pi * step / TOTAL)) / 2,
}
"""Fractions of the learning rate."""


def by_hand(
    steps: range, share: Callable[[int], float], shift_rate: float, shift_decay: float, decay: float
) -> Rows:
    """Train with two optimisers, one per tensor, whose rates are set step by step."""
    model = Rows()
    of_table = torch.optim.AdamW([model.table], weight_decay=decay)
    of_shift = torch.optim.AdamW([model.shift], weight_decay=shift_decay)
    for step in steps:
        now = share(step)
        of_table.param_groups[0]["lr"], of_shift.param_groups[0]["lr"] = (
            RATE * now,
            RATE * shift_rate * now,
        )
        model.zero_grad()
        mean_loss(model, step).backward()
        of_table.step()
        of_shift.step()
    return model


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "group",
    [Group(["shift"], 0.25, 0.9), Group(["shift"], 2.0), Group(["shift"], weight_decay=0.0)],
)
def test_each_group_has_its_own_optimiser(group: Group, schedule: str) -> None:
    model = Rows()
    loop = loop_of(model, schedule=schedule, weight_decay=0.3)
    loop = replace(loop, groups=[group])
    loop.run(0, 8)
    decay = 0.3 if group.weight_decay is None else group.weight_decay
    expected = by_hand(range(8), SCHEDULES[schedule], group.rate, decay, 0.3)
    torch.testing.assert_close(model.table, expected.table, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model.shift, expected.shift, rtol=1e-5, atol=1e-6)
    plain = Rows()
    loop_of(plain, schedule=schedule, weight_decay=0.3).run(0, 8)
    assert (plain.shift - model.shift).abs().max() > 1e-3


def test_first_step_has_each_group_s_rate() -> None:
    model = Rows()
    loop = loop_of(model, batch_size=5)
    loop = replace(loop, groups=[Group(["shift"], 0.5), Group({"table"}, 2.0)])
    loop.run(0, 1)
    assert model.table.grad is not None
    moved = (model.table - Rows().table).abs()[model.table.grad.abs() > 1e-4]
    torch.testing.assert_close(moved, torch.full_like(moved, 2 * RATE), rtol=1e-3, atol=0)
    moved = (model.shift - Rows().shift).abs()
    torch.testing.assert_close(moved, torch.full_like(moved, RATE / 2), rtol=1e-3, atol=0)


def test_one_group_of_everything_keeps_every_bit() -> None:
    tables = []
    for groups in ([], [Group(["shift", "table"])], [Group(["table"]), Group(["shift"])]):
        loop = loop_of(
            model := Rows(),
            weight_decay=0.1,
            schedule="cosine",
            max_gradient_norm=0.1,
            proximal=0.5,
        )
        loop = replace(loop, groups=groups)
        state = loop.run(0, 3).moments
        loop.run(3, 3, state)
        tables.append(torch.cat([model.table.detach().flatten(), model.shift.detach()]))
    assert torch.equal(tables[0], tables[1])
    assert torch.equal(tables[0], tables[2])


def test_order_of_names_and_groups_is_irrelevant() -> None:
    """The order does not matter between calls either, because moments are stored by name."""
    found = []
    groups = [Group(["shift"], 0.5), Group(["table"], 1.5, 0.2)]
    for first, second in permutations([groups, groups[::-1]]):
        for names in (("table", "shift"), ("shift", "table")):
            loop = loop_of(model := Rows(), names)
            loop = replace(loop, groups=first)
            state = loop.run(0, 2).moments
            loop = replace(loop, groups=second)
            loop.run(2, 2, state)
            found.append(torch.cat([model.table.detach().flatten(), model.shift.detach()]))
    assert all(torch.equal(found[0], one) for one in found[1:])


# ----- bounds -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("group", "words"),
    [
        (
            Group(["shift"], 2.1),
            r"2.1 x training.learning-rate = 0.05 .*: learning-rate = 0.105\d*: input should be",
        ),
        (Group(["shift"], 0.0), r"learning-rate = 0.0: input should be greater than 0"),
        (Group(["shift"], math.inf), r"learning-rate = inf"),
        (
            Group(["shift"], 1.0, 3.0),
            r"weight decay 3: .*learning-rate x weight-decay x steps = 1.5 is above 1",
        ),
        (
            Group(["shift"], 1.0, -0.1),
            r"weight-decay = -0.1: input should be greater than or equal to 0",
        ),
    ],
)
def test_no_group_exceeds_table_s_limits(group: Group, words: str) -> None:
    loop = loop_of(model := Rows())
    loop = replace(loop, groups=[group])
    with pytest.raises(EspalierError, match=words):
        loop.run(0, 1)
    assert torch.equal(model.shift, Rows().shift)


def test_decay_is_checked_with_group_s_rate() -> None:
    """0.04 x 1.25 x 10 is half of the limit; twice the rate reaches it, a higher one exceeds it."""
    training = TrainingSettings(learning_rate=0.04, weight_decay=1.25, steps=10)
    assert Group([], 2.0).settings(training).learning_rate == 0.08
    with pytest.raises(
        EspalierError, match="is above 1, so that a round's first steps are forgotten"
    ):
        Group([], 2.1).settings(training)
    assert Group([], 2.1, 1.0).settings(training).weight_decay == 1.0


def test_what_is_in_no_group_is_left_to_the_table() -> None:
    training = TrainingSettings(learning_rate=0.01)
    found = grouped(["d", "a", "c", "b"], [Group(("c", "a"), 3.0), Group([], 2.0)], training)
    assert [(names, settings.learning_rate) for names, settings in found] == [
        (["a", "c"], 0.03),
        (["b", "d"], 0.01),
    ]
    assert found[1][1] is training
    assert [names for names, _ in grouped(["a"], [Group(["a"])], training)] == [["a"]]


@pytest.mark.parametrize(
    "groups", [[Group(["shift"]), Group(["shift"], 0.5)], [Group(["shift", "head"])]]
)
def test_unknown_or_repeated_name_is_refused(groups: list[Group]) -> None:
    loop = loop_of(Rows())
    loop = replace(loop, groups=groups)
    with pytest.raises(ValueError, match=r"(shift|head): is not trained, or in two groups"):
        loop.run(0, 1)
