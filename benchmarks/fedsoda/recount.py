"""Recount of FedSODA's printed figures."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import fmean

from benchmarks.fedsoda import counts, paper
from benchmarks.fedsoda.paper_models import Model

LLAMA3_HEAD = (128256, 4096)
SIX_BITS = 0.75
"""Bytes per parameter that fit FedSODA's printed sizes."""


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


# ----- printed figures ----------------------------------------------------------------------------


def figures(models: Sequence[Model], tokens: int) -> list[Figure]:
    """Return every printed figure that can be recounted or compared with another one.

    ``tokens`` is the sequence length for section 6.2's computation.
    """
    parts = (
        adapter_figures(models), _size_figures(models), _accuracy_figures(),
        _averages(models, tokens), _storage(models), _datasets(),
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
