"""SFT-P's variants and budgets, and methods with one smaller model for all, one client per domain.

Every cell is a complete run of the app. The score is that of each client's model on its own domain:
for SFT-P the client's own model, for other methods the common one.
"""

import json
from collections.abc import Iterator, Mapping
from itertools import product
from math import sqrt
from typing import Any

from benchmarks.reporting.paired_comparison import Pair
from benchmarks.reporting.perplexity_report import Study
from benchmarks.reporting.rows import Rows
from benchmarks.sft_p import conditioning
from benchmarks.sft_p.runs import DENSE, KEYS, MASKS, SHARES, TRAINED, mixed, private_text, texts_of
from benchmarks.smaller.bench import Bench
from benchmarks.smaller.studies import METHODS, TUNED
from espalier.hf.opening.opened_model import open_model
from espalier.models.plan import ModelPlan
from espalier.results.style import look_of
from espalier.training.mask_history import LOOKED_AT, NEAR

MIXED = (0.2, 0.5, 0.5)
"""Pruning ratios of three clients."""
VARIANTS: dict[str, dict[str, Any]] = {
    "SFT-P NOC/NOA": {"sft-p.conditioned": False, "sft-p.adapters": False},
    "SFT-P NOC/+A": {"sft-p.conditioned": False},
    "SFT-P +C/NOA": {"sft-p.adapters": False},
    "SFT-P +C/+A": {},
}
AS_IT_IS = "as in the other study"
ONE_AT_A_TIME: dict[str, dict[str, Any]] = {
    AS_IT_IS: {},
    "embedding of 8 numbers": {"sft-p.embedding": 8},
    "embedding of 128 numbers": {"sft-p.embedding": 128},
    "code of 8 numbers": {"sft-p.code": 8},
    "shared heads": {"sft-p.heads": "shared"},
    "lambda 4": {"sft-p.strength": 4.0},
    "lambda 64": {"sft-p.strength": 64.0},
    "rate 1e-3": {"sft-p.learning-rate": 1e-3},
    "rate 1e-2": {"sft-p.learning-rate": 1e-2},
    "three times as many rounds": {"federation.rounds": 30},
    "Gumbel, tau 0.4": {"sft-p.estimator": "gumbel", "sft-p.tau": 0.4},
    "ReinMax, tau 0.4": {"sft-p.tau": 0.4},
    "masks by sign": {"sft-p.masks": "sign"},
    "norms of what is read": {"sft-p.norm": "read"},
    "LoRA on q and v": {"lora.targets": "attn.q,attn.v"},
}
"""Choices that the paper leaves open, or that this project made differently.

All other settings are those of ``variants``.
"""
SLICED = "SliceGPT"
OTHERS = ("FLAP", "LLM-Pruner", "LLM-Streamline", SLICED)
"""Methods with one smaller dense model; the first three are in ``benchmarks.smaller``."""
LATER = ", mixed"
UNIFORM = "uniform"
CENTRAL = ", one party"
CENTRALISED = ("LLM-Pruner", "LLM-Streamline", SLICED)
"""Methods that the paper's table 1 also has with all data in one place."""
MEGA = 1e6
FIGURES = (
    "perplexity",
    "megabytes_up",
    "megabytes_down",
    "agreement",
    "chance",
    "rounds_to_budget",
    "seconds",
)
LATE = "late_steps_to_budget"
"""Column with the local steps after which T(g) of a late client's draws meets its budget.

It is empty if they never do, and for clients that took part in the rounds.
"""


def variants(bench: Bench, rows: Rows) -> None:
    """Measure all variants and other methods at two ratios, and mixed budgets.

    The figure is the perplexity on each client's own domain.
    """
    for seed in bench.seeds:
        for share, name in product(SHARES, VARIANTS):
            _masks(bench, rows, seed, [share] * len(bench.private), name)
        for name in ("SFT-P +C/NOA", "SFT-P +C/+A"):
            _masks(bench, rows, seed, list(MIXED[: len(bench.private)]), name, LATER)
        for share, name in product(SHARES, OTHERS):
            _one_for_all(bench, rows, seed, share, name)
        for share, name in product(SHARES, CENTRALISED):
            _one_for_all(bench, rows, seed, share, name, CENTRAL)


def choices(bench: Bench, rows: Rows) -> None:
    """Measure changes of one choice at a time, at 50% of the blocks' weights.

    All runs are conditioned and with LoRA.
    """
    for seed, (name, changes) in product(bench.seeds, ONE_AT_A_TIME.items()):
        _masks(bench, rows, seed, [max(SHARES)] * len(bench.private), name, changes=changes)


def budgets(bench: Bench, rows: Rows) -> None:
    """Measure uniform and mixed budgets, and a late last client.

    With mixed budgets, the first half of the clients prunes 20% and the others 50%.
    """
    number = len(bench.private)
    shares = mixed(number)
    for seed in bench.seeds:
        for share in SHARES:
            _masks(bench, rows, seed, [share] * number, UNIFORM)
        _masks(bench, rows, seed, shares, "mixed")
        _masks(
            bench,
            rows,
            seed,
            shares,
            "mixed, the last client late",
            changes={"sft-p.late-clients": 1},
        )


def _masks(
    bench: Bench,
    rows: Rows,
    seed: int,
    shares: list[float],
    name: str,
    suffix: str = "",
    changes: Mapping[str, Any] | None = None,
) -> None:
    """Do a run of SFT-P with a row for each client."""
    texts = texts_of(bench)
    cells = [
        {"seed": seed, "sparsity": share, "model": f"{name}{suffix}", "text": text}
        for share, text in zip(shares, texts, strict=True)
    ]
    if not rows.missing(iter(cells)):
        return
    own = VARIANTS.get(name, changes or {})
    given = {
        **TRAINED,
        **MASKS,
        "pruning.keep-models": False,
        **own,
        "sft-p.ratios": ",".join(map(str, shares)),
    }
    run = bench.run(
        f"{seed}-{shares[0]:g}-{name.replace('/', ' ')}{suffix}",
        {**given, **private_text(bench, seed)},
    )
    document, masks = (
        json.loads((run / file).read_text()) for file in ("summary.json", "masks.json")
    )
    pairs = masks["agreement"]
    agreement, chance = (
        sum(pair[key] for pair in pairs) / len(pairs) for key in ("agreement", "chance")
    )
    for client, cell in zip(document["clients"], cells, strict=True):
        text = cell["text"]
        number = str(client["client"])
        dense = {"seed": seed, "sparsity": 0.0, "model": DENSE, "text": text}
        metric = next(metric for metric in document["metrics"] if metric["dataset"] == text)
        if rows.missing(iter([dense])):
            rows.add(
                dense, perplexity=metric["values"]["dense"], **dict.fromkeys((*FIGURES[1:], LATE))
            )
        rows.add(
            cell,
            perplexity=client["metrics"][f"perplexity/{text}/federated"],
            **_traffic(document),
            agreement=agreement,
            chance=chance,
            rounds_to_budget=rounds_to_budget(masks["spent"].get(number, [])),
            seconds=client["seconds"],
            **{LATE: masks["late"].get(number, {}).get("steps_to_budget")},
        )


def rounds_to_budget(spent: list[list[float]]) -> float | None:
    """Return the first round whose last draws meet the budget within ``NEAR``, on average.

    These are draws before masks are fitted to the budget.
    """
    for number, draws in enumerate(spent, start=1):
        last = draws[-LOOKED_AT:]
        if last and abs(sum(last) / len(last) - 1) <= NEAR:
            return float(number)
    return None


def _one_for_all(
    bench: Bench, rows: Rows, seed: int, share: float, name: str, where: str = ""
) -> None:
    """Do a run that makes one smaller model, and one that tunes it.

    With ``CENTRAL`` as ``where``, the first run has a single client with all texts.
    """
    cells = [
        {"seed": seed, "sparsity": share, "model": f"{name}{where}{tuned}", "text": text}
        for tuned, text in product(("", TUNED), texts_of(bench))
    ]
    if not rows.missing(iter(cells)):
        return
    given = {key: share if value is None else value for key, value in METHODS.get(name, {}).items()}
    if name == SLICED:
        given = {
            "method": "slicegpt",
            "slicegpt.multiple": 1,
            "slicegpt.width-pruning-ratio": slicing_for(open_model(bench.model).plan, share),
        }
    text = private_text(bench, seed)
    samples = 32
    if where == CENTRAL:
        text = text | {"num-clients": 1, "data.path": str(bench.pooled())}
        samples = samples * len(bench.private)
    made = bench.run(
        f"{seed}-{share:g}-{name}{where}", {**given, **text, "data.num-samples": samples}
    )
    tuning = {**TRAINED, "method": "fedpetuning", "lora.merge": True, "model": str(made)}
    tuned = bench.run(f"{seed}-{share:g}-{name}{where}{TUNED}", {**tuning, **text})
    for label, runs in (("", [made]), (TUNED, [made, tuned])):
        documents = [json.loads((run / "summary.json").read_text()) for run in runs]
        for metric in documents[-1]["metrics"]:
            cell = {
                "seed": seed,
                "sparsity": share,
                "model": f"{name}{where}{label}",
                "text": metric["dataset"],
            }
            if rows.missing(iter([cell])):
                nothing = dict.fromkeys(("agreement", "chance", "rounds_to_budget"))
                seconds = sum(
                    client["seconds"] for document in documents for client in document["clients"]
                )
                traffic = _traffic(*documents)
                own = {"seconds": seconds / len(documents[0]["clients"])}
                rows.add(
                    cell, perplexity=metric["values"]["federated"], **traffic, **nothing, **own
                )


def slicing_for(plan: ModelPlan, share: float) -> float:
    """Return the fraction of the residual width that must go for a pruning ratio.

    The ratio refers to the blocks' weights. If the fraction ``x`` of the width ``d`` remains,
    matrices keep the fraction ``x`` of their weights, and each block gets two square matrices of
    size ``x * d``.
    """
    width = plan.blocks[0].linears[0].shape[1]
    added = 2 * len(plan.blocks) * width**2 / plan.num_weights
    return 1 - (sqrt(1 + 4 * added * (1 - share)) - 1) / (2 * added)


def _traffic(*documents: Mapping[str, Any]) -> dict[str, float]:
    clients = len(documents[0]["clients"])
    return {
        f"megabytes_{way}": sum(document[f"bytes_{way}"] for document in documents) / clients / MEGA
        for way in ("up", "down")
    }


def _pairs() -> Iterator[Pair]:
    yield Pair("SFT-P +C/+A", "SFT-P NOC/+A")
    yield Pair("SFT-P +C/NOA", "SFT-P NOC/NOA")
    yield Pair("SFT-P +C/+A", "SFT-P +C/NOA")
    yield Pair("SFT-P +C/+A, mixed", "SFT-P +C/+A")
    yield Pair("SFT-P +C/NOA, mixed", "SFT-P +C/NOA")
    for name in OTHERS:
        yield Pair("SFT-P +C/+A", f"{name}{TUNED}")
    for name in CENTRALISED:
        yield Pair(f"{name}{TUNED}", f"{name}{CENTRAL}{TUNED}")


LOOK = look_of("sft-p")
DRAWN = {
    "rounds_to_budget": "rounds until T(g) of the last local draws is within 2% of the target",
    LATE: "late steps until T(g) of ten draws is within 2% of the target",
}
STUDIES = {
    "variants": Study(
        "SFT-P: variants, mixed budgets, and one smaller model for all", KEYS, FIGURES,
        variants,
        tuple(_pairs()), LOOK, {"": "not tuned afterwards", TUNED: "tuned afterwards"},
        headings=DRAWN,
    ),
    "choices": Study(
        "SFT-P: one choice at a time", KEYS, FIGURES,
        choices,
        tuple(Pair(name, AS_IT_IS) for name in ONE_AT_A_TIME if name != AS_IT_IS), LOOK,
        ordered=True, headings=DRAWN,
    ),
    "budgets": Study(
        "SFT-P: uniform and mixed budgets, and a late client", KEYS, (*FIGURES, LATE),
        budgets,
        (Pair("mixed", UNIFORM), Pair("mixed, the last client late", "mixed")), LOOK,
        headings=DRAWN,
    ),
    "conditioning": Study(
        "SFT-P: conditioning with mixed budgets", KEYS, conditioning.FIGURES,
        conditioning.conditioning,
        conditioning.PAIRS, LOOK, headings=conditioning.HEADINGS,
    ),
}  # fmt: skip
