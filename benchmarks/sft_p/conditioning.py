"""Conditioning of SFT-P's generator on a client: by its embedding, and by its budget as an input.

The first half of the clients prunes 20% and the others 50%. Measured are the clients' models, the
agreement of their masks, and T(g) divided by a client's target at three places: at the start of a
round with the averaged generator, at the end of a round with the client's own generator, and of the
masks of its final model.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import product
from statistics import fmean
from typing import Any

from benchmarks.reporting.paired_comparison import Pair
from benchmarks.reporting.rows import Rows
from benchmarks.sft_p.runs import DENSE, MASKS, TRAINED, mixed, private_text, texts_of
from benchmarks.smaller.bench import Bench
from espalier.hf.opening.opened_model import open_model
from espalier.hf.structured.residual_gates import ResidualGates

CHANGES = {"data.sequence-length": 64, "sft-p.learning-rate": 1e-2}
"""Differences from the settings of the other studies."""
OFF = "not conditioned"
PAPER = "conditioned"
MIDDLE = 0.35
"""Ratio between the budgets, from which the clients' inputs are counted."""
ARMS: dict[str, dict[str, Any]] = {
    PAPER: {},
    "budget as input x 10": {"sft-p.budget-input": 10.0},
    "budget as input x 10, from 35%": {"sft-p.budget-input": 10.0, "pruning.ratio": MIDDLE},
    "embedding's deviation 1": {"sft-p.embedding-deviation": 1.0},
    OFF: {"sft-p.conditioned": False},
    "budget as input": {"sft-p.budget-input": 1.0},
}
LAST = 3
"""Number of last rounds over which T at the start and at the end of a round is averaged."""
FIGURES = (
    "perplexity",
    "T_at_start_of_round",
    "T_at_last_local_step",
    "T_of_final_mask",
    "agreement_with_equal_budget",
    "chance_with_equal_budget",
    "agreement_with_other_budget",
    "chance_with_other_budget",
    "seconds",
)
HEADINGS = {
    "T_at_start_of_round": (
        "T(g) at the start of a round (averaged generator), divided by the target"
    ),
    "T_at_last_local_step": "T(g) at a client's last local step, divided by the target",
    "T_of_final_mask": "T(g) of the final, projected masks, divided by the target",
}
RATE = "embedding's rate x 10"
"""Arm that was measured with other code: the embedding in a group of its own. It has no setting."""
PAIRS = tuple(Pair(name, PAPER) for name in (*ARMS, RATE) if name != PAPER)


def conditioning(bench: Bench, rows: Rows) -> None:
    """Measure mixed budgets with every kind of conditioning."""
    for seed, name in product(bench.seeds, ARMS):
        _run(bench, rows, seed, name)


def _run(bench: Bench, rows: Rows, seed: int, name: str) -> None:
    """Do one run, with a row for each client."""
    texts = texts_of(bench)
    shares = mixed(len(bench.private))
    cells = [
        {"seed": seed, "sparsity": share, "model": name, "text": text}
        for share, text in zip(shares, texts, strict=True)
    ]
    if not rows.missing(iter(cells)):
        return
    given = {
        **TRAINED,
        **MASKS,
        **CHANGES,
        "pruning.keep-models": False,
        **ARMS[name],
        "sft-p.ratios": ",".join(map(str, shares)),
    }
    run = bench.run(f"{seed}-conditioning-{name}", {**given, **private_text(bench, seed)})
    document, masks = (
        json.loads((run / file).read_text()) for file in ("summary.json", "masks.json")
    )
    gates = ResidualGates(open_model(bench.model).plan)
    figures = agreements(masks["agreement"], shares)
    for client, cell, share in zip(document["clients"], cells, shares, strict=True):
        text = cell["text"]
        number = str(client["client"])
        dense = {"seed": seed, "sparsity": 0.0, "model": DENSE, "text": text}
        if rows.missing(iter([dense])):
            metric = next(metric for metric in document["metrics"] if metric["dataset"] == text)
            rows.add(dense, perplexity=metric["values"]["dense"], **dict.fromkeys(FIGURES[1:]))
        last = masks["spent"][number][-LAST:]
        spent = final_spent(masks["density"][number], gates)
        rows.add(
            cell,
            perplexity=client["metrics"][f"perplexity/{text}/federated"],
            T_at_start_of_round=fmean(draws[0] for draws in last),
            T_at_last_local_step=fmean(draws[-1] for draws in last),
            T_of_final_mask=spent / gates.target(share, "blocks"),
            **figures,
            seconds=client["seconds"],
        )


def agreements(pairs: Sequence[Mapping[str, Any]], shares: Sequence[float]) -> dict[str, float]:
    """Return mean agreement and chance of pairs of clients with equal and with other budgets."""
    found = {}
    for whose, equal in (("equal", True), ("other", False)):
        own = [
            pair for pair in pairs if equal == (len({shares[one] for one in pair["clients"]}) == 1)
        ]
        for key in ("agreement", "chance"):
            found[f"{key}_with_{whose}_budget"] = fmean(pair[key] for pair in own)
    return found


def final_spent(densities: Mapping[str, Sequence[float]], gates: ResidualGates) -> float:
    """Return T(g) of masks with these densities, by kind of gate and block."""
    blocks = [block.index for block in gates.plan.blocks]
    return sum(
        density * gates.widths[block, kind] * gates.costs[block, kind]
        for kind, own in densities.items()
        for block, density in zip(blocks, own, strict=True)
    )
