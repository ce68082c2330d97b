"""Costs of SFT-P on the paper's models, and a recount of printed figures, on the meta device."""

import csv
import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import get_args

from benchmarks.models.published_models import Tuned, tuned
from benchmarks.sft_p import paper
from espalier.hf.structured.residual_gates import ResidualGates
from espalier.models.adapters import AdapterPlan
from espalier.models.mask_generator import GeneratorShape, Heads
from espalier.settings.tables.federation import WireDtype
from espalier.settings.tables.lora import LoraSettings
from espalier.storage.atomic import write_bytes

EMBEDDING = CODE = 32
"""Size of embeddings and codes; the paper specifies neither."""
FLOAT32 = 4
MOMENTS = 2
MIB = 1 << 20
CSV_COLUMNS = ("table", "row", "quantity", "printed", "computed", "agrees", "why")


@dataclass(frozen=True)
class Figure:
    """Printed figure and its recount."""

    table: str
    row: str
    quantity: str
    printed: str
    computed: float
    why: str = ""
    """Reason for a difference."""

    @property
    def agrees(self) -> bool:
        """True if the recount rounds to the printed figure, with a tolerance for floating point."""
        digits = len(self.printed.partition(".")[2])
        return abs(self.computed - float(self.printed)) <= 0.5 * 10**-digits + 1e-9


@cache
def costs(name: str) -> Tuned:
    """Return the costs of one of the paper's models with the paper's LoRA."""
    return tuned(paper.MODELS[name], LoraSettings(rank=paper.RANK, targets=",".join(paper.TARGETS)))


def shared(name: str, heads: Heads, *, adapters: bool) -> AdapterPlan:
    """Return the plan of everything that clients share: generator, and LoRA if ``adapters``."""
    own = costs(name)
    shape = GeneratorShape(EMBEDDING, CODE, paper.WIDTH, heads)
    plan = own.adapters if adapters else replace(own.adapters, blocks={})
    return replace(plan, whole=shape.shapes(own.plan))


def figures() -> Iterator[Figure]:
    """Yield every printed figure that can be recounted."""
    for table, lines in paper.AVERAGES.items():
        for row, (*scores, printed) in lines.items():
            yield Figure(
                table,
                row,
                "mean of four scores",
                printed,
                fmean(map(float, scores)),
                _why(table, row),
            )
    fifty = paper.AVERAGES["1, LLaMA-7B, 50%"]
    best = max(float(line[4]) for row, line in fifty.items() if row.endswith("(FL)"))
    yield Figure(
        "abstract",
        "50%",
        "points above the best federated baseline",
        "8.5",
        float(fifty["SFT-P +C/+A"][4]) - best,
    )
    why = "these are ARC-Easy's scores; the printed means of +C/+A and +C/NOA are 59.32 and 58.65"
    yield Figure(
        "section 4.3", "SFT-P +C/+A, 50%", "Avg", "60.27", float(fifty["SFT-P +C/+A"][4]), why
    )
    yield Figure(
        "section 4.3", "SFT-P +C/NOA, 50%", "Avg", "58.12", float(fifty["SFT-P +C/NOA"][4]), why
    )
    places = {"ARC-Easy, HellaSwag": (0, 1), "PIQA, WinoGrande": (2, 3)}
    for (row, share, tasks), values in paper.TABLE_2.items():
        line = paper.AVERAGES[f"1, LLaMA-7B, {share}"][row]
        for task, value, place in zip(tasks.split(", "), values, places[tasks], strict=True):
            yield Figure("2", f"{row} ({share} all)", task, value, float(line[place]))
    why = "a gate is on with probability sigmoid(3) at first"
    yield Figure(
        "section 3.2",
        "at initialisation",
        "fraction of active residual dimensions",
        "1.00",
        1 / (1 + math.exp(-paper.BIAS)),
        why,
    )


def _why(table: str, row: str) -> str:
    if (table, row) == ("1, LLaMA-7B, 20%", "LLMPruner+Finetune"):
        return "the mean of the four scores is two points lower"
    return "not the mean of its four scores"


# ----- Markdown and CSV ---------------------------------------------------------------------------


def report() -> str:
    """Return all tables as Markdown."""
    found = list(figures())
    agreeing = sum(figure.agrees for figure in found)
    missed = [figure for figure in found if not figure.agrees]
    lines = [
        "# SFT-P: costs, and figures of the paper",
        "",
        "Counted from the models' shapes, without weights: a generator of width "
        f"{paper.WIDTH} with embeddings and codes of {EMBEDDING}, LoRA of rank {paper.RANK} on "
        f"{', '.join(paper.TARGETS)}. MiB are 2^20 bytes. The paper prints no size and no traffic.",
        "",
        "## Budget of the blocks",
        "",
        "T(g) counts weights of the blocks' matrices. Embeddings, head and norms always stay, so a "
        "fraction of the whole model removes more of the blocks.",
        "",
        *_table(("model", "parameters", "in the blocks' matrices", "pruned", "maximum T(g)",
                 "remaining fraction of the blocks", "the same for all parameters"), _budgets()),
        "",
        "## What clients and server exchange",
        "",
        "Generator and LoRA are sent up and down in every round. There is one head for each gate, "
        "or one for each kind (`shared`).",
        "",
        *_table(("model", "heads", "generator", "LoRA",
                 *(f"one way, {wire_dtype}, MiB" for wire_dtype in get_args(WireDtype)),
                 "without LoRA, float32, MiB"), _shared()),
        "",
        "## What stays at a client",
        "",
        f"Its embedding ({EMBEDDING} numbers, {FLOAT32 * EMBEDDING} bytes), the two moments of "
        f"AdamW ({FLOAT32 * MOMENTS * EMBEDDING} bytes), and one bit for each residual dimension "
        "of its masks:",
        "",
        *_table(("model", "residual dimensions", "bytes of masks"), _masks()),
        "",
        "## Figures of the paper",
        "",
        (
        f"{agreeing} of {len(found)} figures that can be recomputed agree within the printed"
        " rounding. The others:"
),
        "",
        *_table(("table", "row", "figure", "printed", "counted", "why"), (
            (one.table, one.row, one.quantity, one.printed, f"{one.computed:.2f}", one.why)
            for one in missed
        )),
        "",
    ]  # fmt: skip
    return "\n".join(lines)


def _budgets() -> Iterator[Sequence[str]]:
    for name in paper.MODELS:
        plan = costs(name).plan
        gates = ResidualGates(plan)
        for share in paper.SHARES:
            blocks = gates.target(share, "blocks")
            model = gates.target(share, "model")
            yield (
                name, f"{plan.num_parameters:,}", f"{gates.total:,}", f"{share:.0%}", f"{blocks:,}",
                f"{blocks / gates.total:.4f}", f"{model / gates.total:.4f}",
            )  # fmt: skip


def _shared() -> Iterator[Sequence[str]]:
    for name in paper.MODELS:
        for heads in get_args(Heads):
            whole, masks = (
                replace(costs(name), adapters=shared(name, heads, adapters=adapters))
                for adapters in (True, False)
            )
            lora = whole.trained - masks.trained
            sizes = [
                sum(whole.blob_bytes(wire_dtype).values()) for wire_dtype in get_args(WireDtype)
            ]
            sizes.append(sum(masks.blob_bytes("float32").values()))
            yield (
                name,
                heads,
                f"{masks.trained:,}",
                f"{lora:,}",
                *(f"{size / MIB:.2f}" for size in sizes),
            )


def _masks() -> Iterator[Sequence[str]]:
    for name in paper.MODELS:
        dimensions = sum(ResidualGates(costs(name).plan).widths.values())
        yield name, f"{dimensions:,}", f"{-(-dimensions // 8):,}"


def _table(columns: Sequence[str], rows: Iterator[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(line)} |" for line in (columns, ["---"] * len(columns), *rows)]


def write(directory: Path) -> None:
    """Write ``tables.csv`` and ``tables.md``.

    Raises
    ------
    InputError
        The directory cannot be written to.
    """
    text = io.StringIO()
    table = csv.DictWriter(text, CSV_COLUMNS, lineterminator="\n")
    table.writeheader()
    for one in figures():
        row = {name: getattr(one, name) for name in CSV_COLUMNS}
        changed = {"computed": f"{one.computed:.6g}", "agrees": "yes" if one.agrees else "no"}
        table.writerow(row | changed | {"why": "" if one.agrees else one.why})
    write_bytes(directory / "tables.csv", text.getvalue().encode())
    write_bytes(directory / "tables.md", report().encode())
