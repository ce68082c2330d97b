"""Sequences of a step: each occurs once per epoch; only seed and step decide the order."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.training.sequences import sequences_of_step

SIZES = {
    "num_sequences": st.integers(1, 40),
    "batch": st.integers(1, 60),
    "seed": st.integers(0, 2**63),
}


@settings(deadline=None)
@given(**SIZES)
def test_every_sequence_occurs_once_per_epoch(num_sequences: int, batch: int, seed: int) -> None:
    steps = -(-3 * num_sequences // batch)
    drawn = [
        number
        for step in range(steps)
        for number in sequences_of_step(num_sequences, batch, step, seed)
    ]
    assert len(drawn) == steps * batch
    for epoch in range(3):
        assert Counter(drawn[epoch * num_sequences : (epoch + 1) * num_sequences]) == Counter(
            range(num_sequences)
        )


@settings(deadline=None)
@given(**SIZES)
def test_the_order_does_not_depend_on_the_batch(num_sequences: int, batch: int, seed: int) -> None:
    one_by_one = [
        number
        for step in range(2 * batch)
        for number in sequences_of_step(num_sequences, 1, step, seed)
    ]
    assert one_by_one == [
        number
        for step in range(2)
        for number in sequences_of_step(num_sequences, batch, step, seed)
    ]


def test_oversize_batch_spans_several_epochs() -> None:
    drawn = sequences_of_step(3, 8, 0, 7)
    assert sorted(Counter(drawn).values()) == [2, 3, 3]


def test_epochs_and_seeds_differ_in_order() -> None:
    orders = [tuple(sequences_of_step(50, 50, step, seed)) for step in range(3) for seed in (1, 2)]
    assert len(set(orders)) == 6
