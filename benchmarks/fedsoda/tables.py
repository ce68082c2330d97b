"""Tables of FedSODA's printed figures and of the counts behind them, as Markdown and CSV."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from benchmarks.fedsoda import counts, paper
from benchmarks.fedsoda.paper_models import Model
from benchmarks.fedsoda.recount import SIX_BITS, Figure, adapter_figures, placements
from espalier.settings.tables.federation import WireDtype
from espalier.storage.atomic import write_bytes

CSV_COLUMNS = (
    "table",
    "row",
    "quantity",
    "unit",
    "printed",
    "computed",
    "basis",
    "agrees",
    "why",
    "other_reading",
)
COMBINATIONS = ((3, 4, 5), (2, 6, 5), (4, 3, 5), (3, 4, 2), (3, 4, 10))
"""Values of (n, p, r_int) in Tables 4, 7 and 8, the default first."""
PLACEMENTS_SHOWN = 3


def report(models: Sequence[Model], figures: Sequence[Figure], tokens: int) -> str:
    """Return all tables as Markdown."""
    agreeing = sum(figure.agrees for figure in figures)
    head = [
        "# FedSODA: what the paper prints, counted again",
        "",
        (
            f"{agreeing} of {len(figures)} figures agree within the printed rounding. They are"
            " counted from the models' shapes,"
        ),
        f"without weights: rank {paper.RANK} on {', '.join(paper.TARGETS)}; the last",
        (
            f"{paper.ADAPTER_LAYERS} layers are the adapter; unless said n = {paper.PRUNED}, p ="
            f" {paper.GROUPS}, aligned every"
        ),
        (
            f"{paper.INTERVAL} rounds. The paper's MB and GB are 2^20 and 2^30 bytes. Accuracies"
            " are compared only where the paper"
        ),
        "prints them twice; the others take training.",
        "",
    ]
    parts = (
        _printed_part(figures), _model_part(models), _placement_part(models), _wire_part(models),
        _computation_part(models, tokens), _communication_part(models, tokens),
        _storage_part(models),
    )  # fmt: skip
    return "\n".join([*head, *(line for part in parts for line in (*part, ""))]).rstrip() + "\n"


def write(figures: Sequence[Figure], text: str, directory: Path) -> None:
    """Write ``tables.csv`` and ``tables.md``.

    Raises
    ------
    InputError
        The directory cannot be written to.
    """
    lines = io.StringIO()
    table = csv.DictWriter(lines, CSV_COLUMNS, lineterminator="\n")
    table.writeheader()
    for figure in figures:
        row = {name: getattr(figure, name) for name in CSV_COLUMNS}
        other = "" if figure.other_reading is None else f"{figure.other_reading:.6g}"
        row |= {
            "computed": f"{figure.computed:.6g}",
            "agrees": "yes" if figure.agrees else "no",
            "other_reading": other,
        }
        table.writerow(row)
    write_bytes(directory / "tables.csv", lines.getvalue().encode())
    write_bytes(directory / "tables.md", text.encode())


def _markdown(
    columns: Sequence[str], rows: Sequence[Sequence[str]], words: Sequence[int] = (0,)
) -> list[str]:
    """Return a Markdown table; columns at ``words`` are text, the others numbers."""
    rule = ["---" if place in words else "---:" for place in range(len(columns))]
    return [f"| {' | '.join(line)} |" for line in (columns, rule, *rows)]


def _shown(value: float, decimals: int) -> str:
    """Return a number with two more decimals than printed, unless these are zero."""
    return f"{value:,.{decimals if abs(value - round(value, decimals)) < 1e-9 else decimals + 2}f}"


def _printed_part(figures: Sequence[Figure]) -> list[str]:
    lines = ["## Every printed figure"]
    for table in dict.fromkeys(figure.table for figure in figures):
        rows = []
        for figure in (figure for figure in figures if figure.table == table):
            basis = "" if figure.basis == "counted" else f" ({figure.basis})"
            computed = f"{_shown(figure.computed, figure.decimals)}{basis}"
            other = (
                ""
                if figure.other_reading is None
                else f": {_shown(figure.other_reading, figure.decimals)}"
            )
            verdict = "yes" if figure.agrees else "**no**"
            cells = [figure.row, f"{figure.quantity}, {figure.unit}", figure.printed, computed]
            rows.append([*cells, verdict, f"{figure.why}{other}"])
        columns = [
            "row",
            "quantity",
            "printed",
            "computed",
            "agrees",
            "possible origin of the printed value",
        ]
        lines += ["", f"### {table}", "", *_markdown(columns, rows, (0, 1, 4, 5))]
    return lines


def _model_part(models: Sequence[Model]) -> list[str]:
    rows = []
    for model in models:
        numbers = (
            model.layers,
            model.kept_layers,
            model.emulator,
            model.tuned.footprint.parameters,
            model.kept.parameters,
        )
        sent = (model.u, paper.ADAPTER_LAYERS * model.u, *model.communicated().values())
        rows.append([model.title, *(f"{number:,.0f}" for number in (*numbers, *sent))])
    columns = [
        "model",
        "layers",
        "kept",
        "of the emulator",
        "parameters",
        "of the sub-model",
        "u, of a layer's adapters",
    ]
    columns += ["trained", *(f"a round of {method}" for method in models[0].communicated())]
    return ["## Layers and numbers", "", *_markdown(columns, rows)]


def _placement_part(models: Sequence[Model]) -> list[str]:
    found = placements(models)
    total = len(list(adapter_figures(models)))
    rows = []
    for us, (agreeing, choices) in list(found.items())[:PLACEMENTS_SHOWN]:
        named = "; ".join(", ".join(choice) for choice in choices)
        rows.append([f"{agreeing} of {total}", ", ".join(f"{u:,}" for u in us), named])
    intro = [
        (
            "The paper does not say which matrices have adapters. Of all 127 choices, these go best"
            " with the printed numbers of"
        ),
        "parameters and MB; choices in one line cost the same and cannot be distinguished.",
    ]
    return [
        "## Where the adapters are",
        "",
        *intro,
        "",
        *_markdown(["figures", "u of each model", "choices"], rows, (0, 1, 2)),
    ]


def _wire_part(models: Sequence[Model]) -> list[str]:
    rows = []
    for model in models:
        for pruned, groups, interval in COMBINATIONS:
            numbers = counts.fedsoda_round(model.u, paper.ADAPTER_LAYERS, groups, interval)
            wire_dtypes = [
                model.wire_bytes(wire_dtype, groups, interval) / counts.MIB
                for wire_dtype in _wire_dtypes()
            ]
            sizes = [counts.four_bit_megabytes(numbers), *wire_dtypes]
            case = (f"({pruned}, {groups}), {interval}", f"{numbers / 1e6:.3f}")
            rows.append([model.title, *case, *(f"{size:.4f}" for size in sizes)])
    intro = [
        (
            "Mean of a round, up and down together. NF4 has a float32 scale for every 64 numbers:"
            " 0.5625 bytes a number. A block's"
        ),
        (
            "header, some 900 bytes, is in the sizes; a message's own, less than a kilobyte and 64"
            " bytes a block, is not."
        ),
    ]
    columns = ["model", "(n, p), r", "million numbers", "half a byte each (paper), MiB"]
    columns += [f"our {wire_dtype}, MiB" for wire_dtype in _wire_dtypes()]
    return ["## On the wire", "", *intro, "", *_markdown(columns, rows, (0, 1))]


def _wire_dtypes() -> list[WireDtype]:
    known: tuple[WireDtype, ...] = get_args(WireDtype)
    return sorted(known, key=["nf4", "bfloat16", "float32"].index)


def _computation_part(models: Sequence[Model], tokens: int) -> list[str]:
    rows = []
    for model in models:
        steps = model.steps(tokens)
        soda, tuned, whole = (steps[name] for name in ("FedSODA", "FedPETuning", "all weights"))
        share = counts.computation_share(model.layers, model.kept_layers, paper.ADAPTER_LAYERS)
        shares = [
            share,
            soda.total / tuned.total,
            soda.total / whole.total,
            soda.forward / tuned.total,
        ]
        layer = counts.layer_operations(model.linears, tokens)
        work = [f"{number / 1e9:,.0f}" for number in (layer, whole.total, tuned.total, soda.total)]
        rows.append([model.title, *work, *(f"{100 * value:.1f}%" for value in shares)])
    intro = [
        (
            f"10^9 operations of a training step on one sequence of {tokens} tokens. The section's"
            " formula, (m^L + m^A) / 2 m^G,"
        ),
        (
            "takes a backward pass to cost as much as a forward pass, which holds where matrices"
            " are frozen (FedPETuning); to"
        ),
        (
            "train them costs twice as much. The head, which the section leaves out, is passed"
            " forward and backward by all."
        ),
        "FedSODA's forward passes (last column) are already far above the 8.55% of section 6.2.",
    ]
    columns = [
        "model",
        "a layer, forward",
        "all weights",
        "FedPETuning",
        "FedSODA",
        "formula of 5.1",
        "relative to FedPETuning",
    ]
    columns += ["of training all weights", "forward alone, of FedPETuning's"]
    return ["## Computation, section 5.1", "", *intro, "", *_markdown(columns, rows)]


def _communication_part(models: Sequence[Model], tokens: int) -> list[str]:
    rows = []
    for model in models:
        aligned = paper.GROUPS
        adapter = paper.ADAPTER_LAYERS
        orders = [
            counts.lora_communication(some, adapter, paper.RANK, model.hidden)
            for some in (aligned, 0)
        ]
        everything = counts.full_communication(tokens, model.hidden, model.layers, model.vocabulary)
        real = [
            (aligned + adapter) * model.u,
            adapter * model.u,
            model.tuned.footprint.parameters,
        ]
        shares = [f"{orders[0] / everything:.4%}", f"{real[0] / real[2]:.4%}"]
        rows.append(
            [model.title, *(f"{number:,}" for number in (*orders, everything, *real)), *shares]
        )
    intro = [
        (
            "One direction, in numbers. The orders leave constants out, and these are large: u is"
            " 13 to 17 times r d. Where"
        ),
        (
            "nothing is aligned, m^A is left and not, as printed, m^S; and the embeddings' size is"
            " V d, not S d."
        ),
    ]
    columns = [
        "model",
        "(m^S + m^A) r d",
        "m^A r d",
        "S d + m^G d^2 + V d",
        "(m^S + m^A) u",
        "m^A u",
        "all parameters",
    ]
    columns += ["order, aligned", "counted, aligned"]
    return ["## Communication, section 5.2", "", *intro, "", *_markdown(columns, rows)]


def _storage_part(models: Sequence[Model]) -> list[str]:
    rows = []
    for model in models:
        kept = model.kept
        formulas = [counts.float32_bytes(kept.parameters), counts.nf4_bytes(kept.parameters)]
        formulas += [
            formulas[1] + kept.parameters * counts.constant_bits(nested_block=nested) / 8
            for nested in (0, 256)
        ]
        true = [
            kept.weight_bytes("bfloat16"),
            kept.weight_bytes("nf4", double_quantisation=False),
            kept.weight_bytes("nf4"),
        ]
        sizes = [*formulas, *true, SIX_BITS * kept.parameters]
        rows.append(
            [
                model.title,
                *(f"{size / counts.GIB:.3f}" for size in sizes),
                paper.TABLE_2[model.name]["FedSODA"].size,
            ]
        )
    intro = [
        (
            "GiB of the sub-model. The formulas assume that all parameters are quantised; in"
            " fact only linear layers are, and embeddings, head,"
        ),
        (
            "norms and biases stay in bfloat16. Headers and configuration of the files come on top,"
            " less than a megabyte."
        ),
    ]
    columns = [
        "model",
        "float32, 4 P",
        "NF4, P / 2",
        "with constants",
        "doubly quantised",
        "true, bfloat16",
        "true, NF4",
    ]
    columns += ["true, doubly quantised", "6 bits a parameter", "printed"]
    return ["## Storage, appendix C", "", *intro, "", *_markdown(columns, rows)]
