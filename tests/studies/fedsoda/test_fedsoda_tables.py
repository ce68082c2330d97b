"""FedSODA's tables, computed as by hand and compared with the figures that the paper prints."""

import csv
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.fedsoda import counts, paper, paper_models, recount
from benchmarks.fedsoda.__main__ import main
from benchmarks.fedsoda.paper_models import Model
from benchmarks.fedsoda.recount import Figure
from espalier.settings.tables.federation import WireDtype

LLAMA3 = {
    "attn.q": (4096, 4096), "attn.k": (1024, 4096), "attn.v": (1024, 4096), "attn.o": (4096, 4096),
    "mlp.gate": (14336, 4096), "mlp.up": (14336, 4096), "mlp.down": (4096, 14336),
}  # fmt: skip
GIB = 2**30


@pytest.fixture(scope="module")
def models() -> dict[str, Model]:
    return {model.name: model for model in paper_models.models()}


@pytest.fixture(scope="module")
def figures(models: dict[str, Model]) -> list[Figure]:
    return recount.figures(list(models.values()), 512)


def the(figures: list[Figure], table: str, row: str, quantity: str) -> Figure:
    (found,) = [
        one for one in figures if (one.table, one.row, one.quantity) == (table, row, quantity)
    ]
    return found


# ----- formulas -----------------------------------------------------------------------------------


def test_a_layer_s_adapters_have_so_many_numbers() -> None:
    """q, k, v, up and down have 8 x (8192 + 5120 + 5120 + 18432 + 18432) parameters."""
    assert counts.lora_numbers(LLAMA3, 8, paper.TARGETS) == 8 * 55_296 == 442_368


def test_rounds_send_what_their_formulas_say() -> None:
    assert counts.kept_layers(32, 3, 4) == 20
    assert counts.fedpetuning_round(10, 32) == 640
    assert counts.fedot_round(10, 3) == 60
    assert counts.fedbiot_round(10, 3, 17) == 230
    assert counts.fedsoda_round(10, 3, 4, 5) == 68
    assert counts.fedsoda_round(442_368, 3, 4, 5) == pytest.approx(3_008_102.4)
    assert counts.four_bit_megabytes(3 * 2**20) == 1.5


def test_communication_of_section_5_2() -> None:
    assert counts.full_communication(2, 3, 4, 5) == 6 + 36 + 15
    assert counts.lora_communication(4, 3, 8, 100) == 5_600
    assert counts.lora_communication(0, 3, 8, 100) == 2_400


def test_computation_of_section_5_1() -> None:
    assert counts.computation_share(32, 20, 3) == 23 / 64
    shapes = {"attn.q": (2, 3), "mlp.up": (5, 1)}
    assert counts.layer_operations(shapes, 10) == 2 * 10 * 11 + 4 * 100 * 2
    step = counts.lora_step(layer=100, lora=7, head=30, layers=20, adapted=7, trained=3)
    assert (step.forward, step.backward) == (2000 + 49 + 30, 3 * 114 + 30)
    assert counts.full_step(100, 30, 20).total == 3 * 2030


def test_attention_has_two_products_per_pair() -> None:
    """Scores and mixtures each take a multiplication and an addition per query feature.

    The loop goes over all pairs of tokens.
    """
    tokens = 5
    features = 6
    by_hand = sum(2 * (features + features) for _ in range(tokens) for _ in range(tokens))
    assert (
        counts.layer_operations({"attn.q": (features, 1)}, tokens)
        == by_hand + 2 * tokens * features
    )


def test_storage_of_appendix_c() -> None:
    assert counts.float32_bytes(100) == 400
    assert counts.nf4_bytes(100) == 50
    assert counts.constant_bits() == 0.5
    assert counts.constant_bits(nested_block=256) == 0.126953125


@pytest.mark.parametrize(
    ("printed", "computed", "decimals", "expected"),
    [("1.4", 1.449984, 1, True), ("2.6", 2.654208, 1, False), ("1.35", 1.345, 2, True),
     ("3", 3.008, 1, True), ("3", 3.2, 1, False), ("24", 23.7, 0, True),
     ("1.51", 1.51875, 2, False)],
)  # fmt: skip
def test_agreement_is_to_the_printed_digit(
    printed: str, computed: float, decimals: int, expected: bool
) -> None:
    assert counts.agrees(printed, computed, decimals) is expected


# ----- the three models ---------------------------------------------------------------------------


def test_models_have_their_layers_and_adapters(models: dict[str, Model]) -> None:
    found = {
        name: (model.u, model.layers, model.kept_layers, model.emulator)
        for name, model in models.items()
    }
    assert found == {
        "llama3-8b": (442_368, 32, 20, 17),
        "qwen2-7b": (483_328, 28, 16, 13),  # 8 x (7168 + 4096 + 4096 + 22528 + 22528)
        "mistral-7b": (442_368, 32, 20, 17),
    }
    assert all(model.tuned.trained == model.layers * model.u for model in models.values())


def test_parameters_are_those_of_published_models(models: dict[str, Model]) -> None:
    whole = {name: model.tuned.footprint.parameters for name, model in models.items()}
    assert whole == {
        "llama3-8b": 8_030_261_248,
        "qwen2-7b": 7_615_616_512,
        "mistral-7b": 7_241_732_096,
    }
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096
    for name in ("llama3-8b", "mistral-7b"):
        assert models[name].kept.parameters == whole[name] - 12 * layer


def test_true_bytes_of_the_sub_model_by_hand(models: dict[str, Model]) -> None:
    """A linear weight takes half a byte and 1/64 of a float32, any other weight two bytes.

    A table has 16 float32 values.
    """
    linears = 20 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    others = 2 * 128_256 * 4096 + 20 * 2 * 4096 + 4096
    kept = models["llama3-8b"].kept
    assert (
        kept.weight_bytes("nf4", double_quantisation=False)
        == linears // 2 + linears // 16 + 2 * others + 64
    )
    # Each of 140 matrices has an offset; there are two tables.
    nested = linears // 2 + linears // 64 + linears // (64 * 256) * 4 + 2 * others
    assert models["llama3-8b"].sizes()["FedSODA"] == nested + 140 * 4 + 4 * (16 + 256)


def test_wire_bytes_are_numbers_and_a_header(models: dict[str, Model]) -> None:
    rounds = 2 * 3 + 4 / 5
    sizes: dict[WireDtype, float] = {"float32": 4, "bfloat16": 2, "nf4": 0.5625}
    for wire_dtype, each in sizes.items():
        beyond = models["llama3-8b"].wire_bytes(wire_dtype, 4, 5) / rounds - each * 442_368
        assert 0 < beyond < 2048


def test_a_step_of_mistral_by_hand(models: dict[str, Model]) -> None:
    tokens = 7
    weights = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    layer = 14 * weights + 4 * 49 * 4096
    lora = 14 * 442_368
    head = 14 * 32_000 * 4096
    steps = models["mistral-7b"].steps(tokens)
    assert steps["FedSODA"].total == 20 * layer + 7 * lora + head + 3 * (layer + 2 * lora) + head
    assert steps["FedPETuning"].total == 32 * (layer + lora) + head + 32 * (layer + 2 * lora) + head
    assert steps["all weights"].total == 3 * (32 * layer + head)


# ----- printed figures ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "quantity", "computed"),
    [("LLaMA3-8B, FedSODA", "trained parameters", 1.327104),
     ("Qwen2-7B, FedSODA", "trained parameters", 1.449984),
     ("LLaMA3-8B, FedSODA", "communicated parameters", 3.0081024),
     ("Qwen2-7B, FedSODA", "communicated parameters", 3.2866304),
     ("Mistral-7B, FedBiOT", "communicated parameters", 10.174464),
     ("LLaMA3-8B, FedPETuning", "model size", 2 * 8_030_261_248 / GIB)],
)  # fmt: skip
def test_figures_of_table_2_that_agree(
    figures: list[Figure], row: str, quantity: str, computed: float
) -> None:
    figure = the(figures, "Table 2", row, quantity)
    assert figure.agrees
    assert figure.computed == pytest.approx(computed, abs=1e-9)
    assert not figure.why


@pytest.mark.parametrize(
    ("table", "row", "quantity", "computed", "reading"),
    [("Table 2", "Qwen2-7B, FedBiOT", "communicated parameters", 19 * 0.483328, 23 * 0.483328),
     ("Table 2", "Qwen2-7B, FedPETuning", "trained parameters", 28 * 0.483328, 32 * 0.483328),
     ("Table 2", "Qwen2-7B, FedPETuning", "communicated parameters", 56 * 0.483328, 64 * 0.483328),
     ("Table 2", "LLaMA3-8B, FedPETuning", "trained parameters", 32 * 0.442368,
      32 * 0.442368 + 8 * 132_352 / 1e6),
     ("Table 2", "Mistral-7B, FedOT", "communicated parameters", 6 * 0.442368, 2.6),
     ("Table 4", "(n, p) = (2, 6)", "communication", 1.51875, 1.51),
     ("Table 7", "r = 10", "communication", 1.475, 0.23046875 * (6 + 1 / 3)),
     ("Table 7", "r = 5", "accuracy", 74.8, 68.6),
     ("Section 6.2", "communication, of FedPETuning's", "average",
      100 * (2 * 6.8 / 64 + 6.8 / 56) / 3, 300 / 30.4),
     ("Abstract", "communication saved, against FedBiOT", "average",
      100 - 680 * (2 / 23 + 1 / 19) / 3, 7200 / 102)],
)  # fmt: skip
def test_disagreeing_figures_have_other_readings(
    figures: list[Figure], table: str, row: str, quantity: str, computed: float, reading: float
) -> None:
    figure = the(figures, table, row, quantity)
    assert not figure.agrees
    assert (figure.computed, figure.other_reading) == pytest.approx((computed, reading))
    assert replace(figure, computed=reading).agrees


def test_all_mb_but_three_agree(figures: list[Figure]) -> None:
    wrong = [(one.table, one.row) for one in figures if one.unit == "MB/round" and not one.agrees]
    assert wrong == [
        ("Table 4", "(n, p) = (2, 6)"),
        ("Table 7", "r = 10"),
        ("Table 8", "(n, p) = (2, 6)"),
    ]


def test_no_printed_size_of_fedsoda_is_nf4(figures: list[Figure], models: dict[str, Model]) -> None:
    for model in models.values():
        figure = the(figures, "Table 2", f"{model.title}, FedSODA", "model size")
        sizes = [
            model.kept.weight_bytes("nf4", double_quantisation=double) / GIB
            for double in (False, True)
        ]
        every = [*sizes, *(model.kept.parameters * each / 8 / GIB for each in (4, 4.127, 4.5))]
        assert not any(counts.agrees(figure.printed, size, 1) for size in every)
        assert counts.agrees(figure.printed, 6 / 8 * model.kept.parameters / GIB, 1)


def test_table_6_is_table_3(figures: list[Figure]) -> None:
    assert paper.ABLATIONS["Table 6"].accuracies == paper.ABLATIONS["Table 3"].accuracies
    rows = [one for one in figures if one.table == "Table 6"]
    assert [(one.computed, one.agrees, "Table 3" in one.why) for one in rows] == [
        (87.8, False, True), (94.3, False, True), (76.6, False, True),
    ]  # fmt: skip


def test_every_disagreeing_figure_is_explained(figures: list[Figure]) -> None:
    assert all(figure.why for figure in figures if not figure.agrees)


def test_six_best_placements_cost_the_same(models: dict[str, Model]) -> None:
    found = recount.placements(list(models.values()))
    assert sum(len(choices) for _, choices in found.values()) == 127
    (best, (agreeing, choices)), (_, (second, _)), *_ = found.items()
    assert best == (442_368, 483_328, 442_368)
    assert agreeing > second
    assert set(map(frozenset, choices)) == {
        frozenset({"attn.k", "attn.v", attention, *linears})
        for attention in ("attn.q", "attn.o")
        for linears in (("mlp.gate", "mlp.up"), ("mlp.gate", "mlp.down"), ("mlp.up", "mlp.down"))
    }


# ----- the command --------------------------------------------------------------------------------


def test_the_command_prints_and_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], figures: list[Figure]
) -> None:
    assert main(["tables", "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert (tmp_path / "out/tables.md").read_text() == printed
    with open(tmp_path / "out" / "tables.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["agrees"] == "yes" for row in rows] == [figure.agrees for figure in figures]
    (qwen,) = [
        row
        for row in rows
        if row["row"] == "Qwen2-7B, FedBiOT" and row["quantity"] == "communicated parameters"
    ]
    assert (qwen["printed"], qwen["computed"], qwen["other_reading"]) == (
        "11.1",
        "9.18323",
        "11.1165",
    )
    assert (
        "| Qwen2-7B, FedBiOT | communicated parameters, million | 11.1 | 9.183 | **no** |"
        in printed
    )
    widths = [line.count("|") for line in printed.splitlines() if line.startswith("|")]
    assert min(widths) > 3


def test_mistakes_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tables", "--tokens", "0"]) == 2
    assert "--tokens 0" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main(["tables", "--out", str(tmp_path / "file")]) == 2
    assert "cannot write" in capsys.readouterr().err


def test_help_waits_for_no_study() -> None:
    code = (
        "import sys; from benchmarks.fedsoda.__main__ import _arguments; _arguments(['tables']);"
        " print('torch' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
