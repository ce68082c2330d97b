"""Recount of FedSODA's printed figures, and the counts behind them."""

import csv
import io
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import get_args

from benchmarks.fedsoda import counts, paper
from benchmarks.models.footprint import Footprint, footprint
from benchmarks.models.published_models import Tuned, tuned
from espalier.settings.tables.federation import WireDtype
from espalier.settings.tables.lora import LoraSettings
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
LLAMA3_HEAD = (128256, 4096)
SIX_BITS = 0.75
"""Bytes per parameter that fit FedSODA's printed sizes."""
PLACEMENTS_SHOWN = 3


@dataclass(frozen=True)
class Model:
    """One of the paper's models, whole and pruned."""

    name: str
    tuned: Tuned
    """The whole model, with adapters on ``paper.TARGETS`` of every layer."""
    kept: Footprint
    """Footprint of the sub-model."""
    u: int
    """Number of parameters in a layer's adapters."""

    @property
    def title(self) -> str:
        """Name in the paper."""
        return paper.TITLES[self.name]

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Shapes of a layer's matrices, (out, in)."""
        return {linear.name: linear.shape for linear in self.tuned.plan.blocks[0].linears}

    @property
    def layers(self) -> int:
        """Number of layers L, or m^G."""
        return len(self.tuned.plan.blocks)

    @property
    def kept_layers(self) -> int:
        """Number of layers of the sub-model, m^L."""
        return counts.kept_layers(self.layers, paper.PRUNED, paper.GROUPS)

    @property
    def emulator(self) -> int:
        """Number of emulator layers of the sub-model, m^E."""
        return self.kept_layers - paper.ADAPTER_LAYERS

    @property
    def vocabulary(self) -> int:
        """Number of rows of the language-model head."""
        return int(self.tuned.config["vocab_size"])

    @property
    def hidden(self) -> int:
        """Hidden size d_model."""
        return int(self.tuned.config["hidden_size"])

    def communicated(self) -> dict[str, float]:
        """Return the numbers that a client sends and receives in a round, by method."""
        adapter = paper.ADAPTER_LAYERS
        return {
            "FedPETuning": counts.fedpetuning_round(self.u, self.layers),
            "FedOT": counts.fedot_round(self.u, adapter),
            "FedBiOT": counts.fedbiot_round(self.u, adapter, self.emulator),
            "FedSODA": counts.fedsoda_round(self.u, adapter, paper.GROUPS, paper.INTERVAL),
        }

    def sizes(self) -> dict[str, int]:
        """Return the bytes of the weights at a client, by method.

        As in the paper, adapters are left out.
        """
        whole = self.tuned.footprint.weight_bytes("bfloat16")
        kept = self.kept.weight_bytes("bfloat16")
        return {
            "FedPETuning": whole,
            "FedOT": kept,
            "FedBiOT": kept,
            "FedSODA": self.kept.weight_bytes("nf4"),
        }

    def steps(self, tokens: int) -> dict[str, counts.Step]:
        """Return the operations of a training step on one sequence, by what is trained."""
        layer = counts.layer_operations(self.linears, tokens)
        lora = 2 * tokens * self.u
        head = 2 * tokens * self.vocabulary * self.hidden
        aligned = paper.GROUPS
        adapter = paper.ADAPTER_LAYERS
        return {
            "all weights": counts.full_step(layer, head, self.layers),
            "FedPETuning": counts.lora_step(
                layer, lora, head, self.layers, self.layers, self.layers
            ),
            "FedSODA": counts.lora_step(
                layer, lora, head, self.kept_layers, aligned + adapter, adapter
            ),
        }

    def wire_bytes(self, wire_dtype: WireDtype, groups: int, interval: int) -> float:
        """Return the mean bytes of a round's blobs in Espalier's wire format, with blob headers."""
        (block,) = set(self.tuned.blob_bytes(wire_dtype).values())
        return counts.fedsoda_round(block, paper.ADAPTER_LAYERS, groups, interval)


@dataclass(frozen=True)
class Figure:
    """Printed figure and its recount."""

    table: str
    row: str
    quantity: str
    unit: str
    printed: str
    decimals: int
    """Number of decimals of its column."""
    computed: float
    basis: str = "counted"
    """Origin of ``computed``."""
    why: str = ""
    """Possible origin of the printed figure."""
    other_reading: float | None = None
    """Value that this origin gives instead of ``computed``."""

    @property
    def agrees(self) -> bool:
        """True if ``computed`` rounds to the printed figure."""
        return counts.agrees(self.printed, self.computed, self.decimals)

    def explained(self, why: str, other_reading: float | None = None) -> "Figure":
        """Return the figure with an explanation if it does not agree; otherwise unchanged."""
        return self if self.agrees else replace(self, why=why, other_reading=other_reading)


def models() -> list[Model]:
    """Return the paper's three models, counted from their shapes."""
    lora = LoraSettings(rank=paper.RANK, targets=",".join(paper.TARGETS))
    return [_model(name, tuned(name, lora)) for name in paper.TITLES]


def _model(name: str, whole: Tuned) -> Model:
    layers = counts.kept_layers(len(whole.plan.blocks), paper.PRUNED, paper.GROUPS)
    kept = footprint({**whole.config, "num_hidden_layers": layers})
    linears = {linear.name: linear.shape for linear in whole.plan.blocks[0].linears}
    return Model(name, whole, kept, counts.lora_numbers(linears, paper.RANK, paper.TARGETS))


# ----- printed figures ----------------------------------------------------------------------------


def figures(models: Sequence[Model], tokens: int) -> list[Figure]:
    """Return every printed figure that can be recounted or compared with another one.

    ``tokens`` is the sequence length for section 6.2's computation.
    """
    parts = (
        adapter_figures(models), _size_figures(models), _accuracy_figures(), _averages(models, tokens), _storage(models),
        _datasets(),
    )  # fmt: skip
    found = [figure for part in parts for figure in part]
    return sorted(found, key=lambda figure: (not figure.table.startswith("Table"), figure.table))


def adapter_figures(models: Sequence[Model]) -> Iterator[Figure]:
    """Yield the figures that follow from ``u``.

    These are trained and sent numbers, and MB of Tables 4, 7 and 8.
    """
    for model in models:
        for method, printed in paper.TABLE_2[model.name].items():
            row = f"{model.title}, {method}"
            trained = model.u * (model.layers if method == "FedPETuning" else paper.ADAPTER_LAYERS)
            sent = model.communicated()[method]
            for quantity, text, value in (
                ("trained", printed.trained, trained),
                ("communicated", printed.communicated, sent),
            ):
                figure = Figure(
                    "Table 2", row, f"{quantity} parameters", "million", text, 1, value / 1e6
                )
                yield figure.explained(*_misread(model, method, quantity))
    for table, study in paper.PARAMETER_STUDIES.items():
        (model,) = [model for model in models if model.name == study.model]
        cases = [
            (f"(n, p) = {pair}", pair[1], paper.INTERVAL, setting)
            for pair, setting in study.combinations.items()
        ]
        cases += [
            (f"r = {interval}", paper.GROUPS, interval, setting)
            for interval, setting in study.intervals.items()
        ]
        for row, groups, interval, setting in cases:
            sent = counts.fedsoda_round(model.u, paper.ADAPTER_LAYERS, groups, interval)
            value = counts.four_bit_megabytes(sent)
            figure = Figure(
                table, row, "communication", "MB/round", setting.communication, 2, value
            )
            yield figure.explained(*_megabytes_misread(model, figure))


def _misread(model: Model, method: str, quantity: str) -> tuple[str, float | None]:
    """Return a possible origin of Table 2's printed parameters."""
    printed = paper.TABLE_2[model.name][method]
    if method == "FedOT":
        return "twice the rounded number of trained parameters", 2 * float(printed.trained)
    if method == "FedBiOT":
        wrong = counts.kept_layers(32, paper.PRUNED, paper.GROUPS) - paper.ADAPTER_LAYERS
        sent = counts.fedbiot_round(model.u, paper.ADAPTER_LAYERS, wrong)
        return (
            f"{wrong} emulator layers, as in models of 32; {model.title} keeps {model.emulator}",
            sent / 1e6,
        )
    directions = 1 if quantity == "trained" else 2
    if model.layers != 32:
        why = f"32 layers, as the two others have; {model.title} has {model.layers}"
        return why, directions * 32 * model.u / 1e6
    head = paper.RANK * (LLAMA3_HEAD[0] + LLAMA3_HEAD[1])
    slip = "a slip for 14.2" if quantity == "trained" else "twice the printed 15.2"
    return (
        f"{slip}, or another adapter on a head of LLaMA3's size",
        directions * (model.layers * model.u + head) / 1e6,
    )


def _megabytes_misread(model: Model, figure: Figure) -> tuple[str, float | None]:
    """Return a possible origin of a printed number of MB per round."""
    if figure.computed - float(figure.printed) < 0.01:
        return (
            "digits cut off; 1.6875 in the same table was rounded up to 1.69",
            math.floor(100 * figure.computed) / 100,
        )
    twelve = counts.fedsoda_round(model.u, paper.ADAPTER_LAYERS, paper.GROUPS, 12)
    return (
        "neither rounded nor cut off; an interval of 12 would give it",
        counts.four_bit_megabytes(twelve),
    )


def _size_figures(models: Sequence[Model]) -> Iterator[Figure]:
    """Yield Table 2's model sizes, in units of 2^30 bytes."""
    why = (
        "6 bits a parameter, 3/8 of bfloat16, fit all three; NF4 linears have 4.1, or 4.5, and the"
        " rest stays at 16"
    )
    for model in models:
        for method, printed in paper.TABLE_2[model.name].items():
            value = model.sizes()[method] / counts.GIB
            figure = Figure(
                "Table 2", f"{model.title}, {method}", "model size", "GB", printed.size, 1, value
            )
            yield figure.explained(why, SIX_BITS * model.kept.parameters / counts.GIB)


def _accuracy_figures() -> Iterator[Figure]:
    """Yield accuracies that the paper prints twice: FedSODA's default settings, against Table 2."""
    for table, ablation in paper.ABLATIONS.items():
        for (model, title), printed in zip(
            paper.TITLES.items(), ablation.accuracies[-1], strict=True
        ):
            other = float(getattr(paper.TABLE_2[model]["FedSODA"], ablation.task))
            figure = Figure(
                table, f"{title}, both alignments", "accuracy", "%", printed, 1, other, "Table 2"
            )
            copied = (
                table != "Table 3" and ablation.accuracies == paper.ABLATIONS["Table 3"].accuracies
            )
            why = (
                "all twelve figures are Table 3's, of another task"
                if copied
                else "another run, or a mistake"
            )
            yield figure.explained(why, float(printed) if copied else None)
    for table, study in paper.PARAMETER_STUDIES.items():
        default = float(paper.TABLE_2[study.model]["FedSODA"].boolq)
        lines_of = {
            "(n, p) = (3, 4)": study.combinations[3, 4],
            f"r = {paper.INTERVAL}": study.intervals[paper.INTERVAL],
        }
        for row, setting in lines_of.items():
            figure = Figure(table, row, "accuracy", "%", setting.accuracy, 1, default, "Table 2")
            copied_from = float(
                paper.PARAMETER_STUDIES["Table 4"].intervals[paper.INTERVAL].accuracy
            )
            yield figure.explained("that of LLaMA3 in Table 4, as is that of r = 2", copied_from)


def _averages(models: Sequence[Model], tokens: int) -> Iterator[Figure]:
    """Yield averages of the abstract and of section 6.2, from counts; accuracies from Table 2."""
    sent = [model.communicated() for model in models]
    sizes = [model.sizes() for model in models]
    first = paper.TABLE_2["llama3-8b"]
    whole = first["FedPETuning"]
    biot = first["FedBiOT"]
    soda = first["FedSODA"]

    def percent(
        table: str, row: str, printed: str, value: float, decimals: int, basis: str = "counted"
    ) -> Figure:
        return Figure(table, row, "average", "%", printed, decimals, 100 * value, basis)

    alone = "only LLaMA3 and Mistral, from rounded figures"
    saved = fmean(1 - one["FedSODA"] / one["FedBiOT"] for one in sent)
    reading = 100 * (1 - float(soda.communicated) / float(biot.communicated))
    row = "communication saved, against FedBiOT"
    yield percent("Abstract", row, paper.COMMUNICATION_SAVED, saved, 1).explained(
        f"3 of 10.2: {alone}", reading
    )
    spared = fmean(1 - one["FedSODA"] / one["FedPETuning"] for one in sizes)
    chance = replace(
        percent("Abstract", "storage saved, against FedPETuning", paper.STORAGE_SAVED, spared, 1),
        why=(
            "perhaps by chance: no size of FedSODA's agrees, and the printed ones give another mean"
        ),
        other_reading=100 * fmean(1 - _printed_share(model.name) for model in models),
    )
    yield chance
    gained = fmean(ratio - 1 for ratio in _gains())
    figure = percent(
        "Abstract",
        "accuracy gained, relative, against FedOT",
        paper.ACCURACY_GAINED,
        gained,
        1,
        "Table 2",
    )
    yield figure.explained(
        "nor in points (2.5), nor against FedBiOT (0.2 relative, 0.1 points) or FedPETuning"
        " (below 0)"
    )
    work = fmean(
        steps["FedSODA"].total / steps["FedPETuning"].total
        for steps in (model.steps(tokens) for model in models)
    )
    reading = 100 * float(soda.trained) / float(whole.trained)
    figure = percent(
        "Section 6.2", "computation, of FedPETuning's", paper.COMPUTATION_SHARE, work, 2
    )
    yield figure.explained(f"1.3 of 15.2, trained parameters, no operations: {alone}", reading)
    share = fmean(one["FedSODA"] / one["FedPETuning"] for one in sent)
    reading = 100 * float(soda.communicated) / float(whole.communicated)
    figure = percent(
        "Section 6.2", "communication, of FedPETuning's", paper.COMMUNICATION_SHARE, share, 2
    )
    yield figure.explained(f"3 of 30.4: {alone}", reading)
    yield from _size_claims(models)


def _gains() -> list[float]:
    """Return FedSODA's accuracy relative to FedOT's, for each model and task of Table 2."""
    tasks = ("gsm8k", "sst2", "boolq")
    pairs = [(lines["FedSODA"], lines["FedOT"]) for lines in paper.TABLE_2.values()]
    return [
        float(getattr(soda, task)) / float(getattr(ot, task))
        for soda, ot in pairs
        for task in tasks
    ]


def _printed_share(name: str) -> float:
    """Return FedSODA's printed size relative to FedPETuning's."""
    lines = paper.TABLE_2[name]
    return float(lines["FedSODA"].size) / float(lines["FedPETuning"].size)


def _size_claims(models: Sequence[Model]) -> Iterator[Figure]:
    """Yield section 6.2's bounds on FedSODA's size."""
    shares = [100 * model.sizes()["FedSODA"] / model.sizes()["FedPETuning"] for model in models]
    printed = [100 * _printed_share(model.name) for model in models]
    for word, pick, text in (
        ("least", min, paper.SIZE_SHARES[0]),
        ("most", max, paper.SIZE_SHARES[1]),
    ):
        figure = Figure(
            "Section 6.2", f"size, of FedPETuning's, {word}", "range", "%", text, 0, pick(shares)
        )
        yield figure.explained("what Table 2's sizes give", pick(printed))
    largest = max(model.sizes()["FedSODA"] for model in models) / counts.GIB
    yield Figure("Section 6.2", "storage, most", "model size", "GB", paper.SIZE, 0, largest)


def _storage(models: Sequence[Model]) -> Iterator[Figure]:
    """Yield the figures of appendix C."""
    parameters = models[0].kept.parameters
    most = counts.float32_bytes(parameters) / counts.nf4_bytes(parameters)
    yield Figure(
        "Appendix C",
        "NF4 without constants, against float32",
        "reduction",
        "times",
        paper.COMPRESSION,
        0,
        most,
    )
    bits = {"without": (paper.CONSTANT_BITS, 1, 0), "with": (paper.NESTED_CONSTANT_BITS, 3, 256)}
    for word, (text, decimals, nested) in bits.items():
        value = counts.constant_bits(nested_block=nested)
        yield Figure(
            "Appendix C",
            f"{word} double quantisation",
            "constants",
            "bits per parameter",
            text,
            decimals,
            value,
        )
    reached = [4 * model.kept.parameters / model.sizes()["FedSODA"] for model in models]
    printed = [
        4 * model.kept.parameters / (float(paper.TABLE_2[model.name]["FedSODA"].size) * counts.GIB)
        for model in models
    ]
    why = "the linear layers have 7.1, or 7.8; this is what Table 2's sizes give"
    for word, pick, text in (
        ("least", min, paper.REDUCTIONS[0]),
        ("most", max, paper.REDUCTIONS[1]),
    ):
        figure = Figure(
            "Appendix C",
            f"sub-model against float32, {word}",
            "reduction",
            "times",
            text,
            0,
            pick(reached),
        )
        yield figure.explained(why, pick(printed))


def _datasets() -> Iterator[Figure]:
    """Yield the sizes of datasets against the sums of their parts (appendix D)."""
    for name, (whole, train, test) in paper.DATASETS.items():
        figure = Figure(
            "Appendix D", name, "size", "examples", whole, 0, train + test, "sum of its parts"
        )
        yield figure.explained("only the training part", train)
    tokens = sum(paper.WIKITEXT_2_PARTS) / 1e6
    figure = Figure(
        "Appendix D",
        "WikiText-2",
        "size",
        "million tokens",
        paper.WIKITEXT_2_TOKENS,
        0,
        tokens,
        "published",
    )
    yield figure.explained("the size of WikiText-103")


# ----- placement of the adapters ------------------------------------------------------------------


def placements(models: Sequence[Model]) -> dict[tuple[int, ...], tuple[int, list[tuple[str, ...]]]]:
    """Compare all 127 choices of adapted matrices with the printed figures.

    Choices with the same ``u`` in every model are grouped; the best group comes first.

    Returns
    -------
    dict
        ``u`` of each model -> number of figures of ``adapter_figures`` that agree, and the choices
    """
    names = list(models[0].linears)
    choices = [choice for size in range(1, len(names) + 1) for choice in combinations(names, size)]
    together = defaultdict(list)
    for choice in choices:
        together[
            tuple(counts.lora_numbers(model.linears, paper.RANK, choice) for model in models)
        ].append(choice)
    found = {}
    for us, alike in together.items():
        changed = [replace(model, u=u) for model, u in zip(models, us, strict=True)]
        found[us] = sum(figure.agrees for figure in adapter_figures(changed)), alike
    return dict(sorted(found.items(), key=lambda item: -item[1][0]))


# ----- Markdown and CSV ---------------------------------------------------------------------------


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
        _computation_part(models, tokens), _communication_part(models, tokens), _storage_part(models),
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
