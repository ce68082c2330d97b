"""Arms that share seeds are compared seed by seed."""

import csv
from itertools import product
from pathlib import Path

import pytest

from benchmarks.fedspallm.studies import FEDERATIONS, FOLDS, SPARSITIES
from benchmarks.reporting.conditions import together
from benchmarks.reporting.paired_comparison import Difference, Pair, difference, paired_table
from benchmarks.studies.cells import table_1

ARMS = {
    ("a", "50%"): {"0": 10.0, "1": 11.0, "2": 12.0},
    ("b", "50%"): {"0": 11.0, "1": 13.0, "2": 15.0},
    ("b", "70%"): {"0": 1.0},
}


def test_a_difference_is_taken_seed_by_seed() -> None:
    """The differences -1, -2 and -3 have mean -2 and standard deviation 1.

    Half of the interval is 4.30265 / sqrt(3) = 2.48414.
    """
    found = difference(ARMS, Pair("a", "b"), "50%")
    assert found == Difference((-1.0, -2.0, -3.0))
    assert found.mean == -2.0
    assert found.half_width == pytest.approx(2.48414, abs=1e-5)
    assert found.text(2) == "−2.00 ± 2.48 (−−−)"


def test_signs_tell_each_seed() -> None:
    assert Difference((0.5, 0.0, -0.25)).signs == "+0−"


def test_one_seed_has_no_interval() -> None:
    assert Difference((1.0,)).text(1) == "+1.0 (+)"


def test_seeds_that_one_arm_lacks_do_not_count() -> None:
    found = difference(
        {("a", "x"): {"0": 1.0, "1": 2.0}, ("b", "x"): {"1": 5.0}}, Pair("a", "b"), "x"
    )
    assert found == Difference((-3.0,))
    assert difference(ARMS, Pair("a", "b"), "70%") is None


def test_table_leaves_out_pairs_without_figures() -> None:
    lines = paired_table(ARMS, [Pair("a", "b"), Pair("a", "c")], ["50%", "70%"], "wiki")
    assert "| a − b | −2.00 ± 2.48 (−−−) |  |" in lines
    assert not any("a − c" in line for line in lines)
    assert paired_table(ARMS, [Pair("a", "c")], ["50%"], "wiki") == []


def test_texts_may_be_added_but_not_changed() -> None:
    found = {"threads": 1, "texts": {"wiki": 1}}
    given = {"threads": 1, "texts": {"c4": 2}}
    assert together(found, given) == ({"threads": 1, "texts": {"wiki": 1, "c4": 2}}, [])
    assert together(found, {"threads": 2, "texts": {"wiki": 3}})[1] == ["texts", "threads"]


DOCS = Path(__file__).parents[2] / "docs" / "studies"
SEEDS = (0, 1, 2)
TEXTS = ("wikitext2", "c4", "stories")


def rows_of(study: str, *columns: str) -> set[tuple[str, ...]]:
    """Return these columns of the rows of a study's CSV file."""
    with open((DOCS / study).with_suffix(".csv"), newline="") as file:
        return {tuple(row[column] for column in columns) for row in csv.DictReader(file)}


@pytest.mark.parametrize("study", ["table-1", "table-1-ties-published"])
def test_table_1_has_every_cell_for_three_texts(study: str) -> None:
    scaled = {False: "off", True: "on"}
    asked = {
        (
            str(cell.setting.seed),
            str(cell.setting.sparsity),
            cell.method,
            cell.server_group,
            scaled[cell.weight_scaling],
            text,
        )
        for cell in table_1(SEEDS)
        for text in TEXTS
    }
    assert asked <= rows_of(
        study, "seed", "sparsity", "method", "server_group", "weight_scaling", "text"
    )


def test_fedspallm_tables_have_every_baseline() -> None:
    names = (*FOLDS, "standalone", "centralized")
    cells = product(map(str, SEEDS), map(str, SPARSITIES), map(str, FEDERATIONS), names, TEXTS)
    assert set(cells) <= rows_of("fedspallm-tables", "seed", "sparsity", "clients", "model", "text")
