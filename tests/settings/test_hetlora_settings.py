"""Settings of HetLoRA: ranks, and refused combinations with the adapters."""

from typing import Any

import pytest

from espalier.errors import EspalierError
from espalier.settings.run import parse


def hetlora(**changes: Any) -> dict[str, Any]:
    """Return settings of a run of the method with changed keys.

    In a key, two underscores stand for a dot and one for a hyphen.
    """
    return {"method": "hetlora"} | {
        key.replace("__", ".").replace("_", "-"): value for key, value in changes.items()
    }


def test_last_rank_repeats_for_further_clients() -> None:
    settings = parse(hetlora(lora__ranks=" 2, 4,8 "))
    assert [settings.job.rank_limit_of(client, settings.lora) for client in range(5)] == [
        2,
        4,
        8,
        8,
        8,
    ]


def test_capability_alone_gives_largest_rank() -> None:
    settings = parse(hetlora(lora__rank=6))
    assert settings.job.rank_limit_of(0, settings.lora) == 6


@pytest.mark.parametrize("ranks", ["2;4", "0,8", "8,", "-8", "2.5", "eight", "\u0968"])
def test_what_is_no_list_of_ranks_is_refused(ranks: str) -> None:
    with pytest.raises(
        EspalierError,
        match=(r"lora.ranks = .*is not a comma-separated list of ranks from 1 to 65536"),
    ):
        parse(hetlora(lora__ranks=ranks))


@pytest.mark.parametrize(
    ("ranks", "largest", "remedy"),
    [
        ("2,4", 4, "set lora.rank=4, or give a client the rank 8"),
        ("2,16", 16, "give no client more than 8, or raise lora.rank"),
    ],
)
def test_the_largest_rank_is_that_of_the_adapters(ranks: str, largest: int, remedy: str) -> None:
    with pytest.raises(EspalierError) as caught:
        parse(hetlora(lora__ranks=ranks, lora__rank=8))
    expected = f"lora.ranks = '{ranks}': the largest is {largest}, and lora.rank is 8; {remedy}"
    assert str(caught.value).splitlines()[1:] == [f"  {expected}"]


def test_bad_ranks_are_told_with_other_mistakes() -> None:
    with pytest.raises(EspalierError) as caught:
        parse(hetlora(lora__ranks="2,4", lora__rank=8, seed=-1))
    assert sorted(line.split()[0] for line in str(caught.value).splitlines()[1:]) == [
        "lora.ranks",
        "seed",
    ]


def test_clients_must_have_the_largest_rank() -> None:
    """Two clients of ranks 2 and 4 would leave ranks 5 to 8 untrained."""
    with pytest.raises(EspalierError) as caught:
        parse(hetlora(lora__ranks="2,4,8", num_clients=2))
    expected = (
        "lora.ranks = '2,4,8': the largest of the first 2 (num-clients) is 4, and lora.rank"
        " is 8; set lora.rank=4, or give a client the rank 8"
    )
    assert str(caught.value).splitlines()[1:] == [f"  {expected}"]
    for ranks, clients in (("2,4,8", 3), ("8,4,2", 2), ("2,8", 100), ("8,2,16", 2)):
        assert parse(hetlora(lora__ranks=ranks, num_clients=clients)).job.ranks == ranks
    with pytest.raises(EspalierError, match="num-clients = 0") as caught:
        parse(hetlora(lora__ranks="2,4,8", num_clients=0))
    assert "lora.ranks" not in str(caught.value)


def test_another_method_does_not_look_at_them() -> None:
    assert parse({"method": "fedpetuning", "lora.ranks": "2,4", "lora.rank": 8}).lora.rank == 8


@pytest.mark.parametrize("gamma", [0.0, 1.5])
def test_gamma_is_a_share(gamma: float) -> None:
    with pytest.raises(EspalierError, match=r"hetlora\.gamma"):
        parse(hetlora(hetlora__gamma=gamma))


@pytest.mark.parametrize(
    ("rank_weights", "asked", "expected"),
    [
        ("all", "auto", "norms"),
        ("holders", "auto", "samples"),
        ("holders", "norms", "norms"),
        ("all", "samples", "samples"),
    ],
)
def test_clients_count_as_in_the_paper_of_the_rank_weights(
    rank_weights: str, asked: str, expected: str
) -> None:
    run = parse(
        {
            "method": "hetlora",
            "hetlora.rank-weights": rank_weights,
            "federation.client-weights": asked,
        }
    )
    assert run.federation.client_weights == expected
