"""Who chooses ratios and ranks: bandits, a schedule or chance, on the devices of a pretended fleet; and LoRA without pruning.

Every device has a part of one domain's text. Its own smaller model is measured on the public text of every domain; a row has
the mean over devices and the worst of them, and what the run took by the fleet's clock. How soon models become good by that
clock is in a file of its own (``curves``).
"""

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.fedspallm.rows import Rows
from benchmarks.fedspallm.studies import Study
from benchmarks.fedspine import curves
from benchmarks.paired import Pair
from benchmarks.smaller.bench import WINDOWS, Bench
from espalier.settings.mistakes import Mistake
from espalier.settings.run import parse
from strategies.methods.refining_time import fleet_of

DEVICES, FLEET = 10, "high"
SHARES = (0.5, 0.3)
TRAINED = {
    "federation.rounds": 20, "training.steps": 10, "training.batch-size": 2, "training.learning-rate": 2e-3,
    "lora.targets": "all", "data.window-tokens": 128, "evaluation.every": 4,
}  # fmt: skip
"""Of all runs."""
BANDIT, DENSE = "bandits", "dense"
PAPER = {"fedspine.exploration": 2.0, "fedspine.granularity": 0.2, "fedspine.discount": 0.95}
CHOICES: dict[str, dict[str, Any]] = {
    BANDIT: {},
    "bandits, the paper's factor": PAPER,
    "bandits, one rank (w/o A_T)": {"fedspine.adaptive-rank": False},
    "bandits, one ratio": {"fedspine.adaptive-pruning": False},
    "bandits, nothing pruned (w/o A_P)": {"fedspine.adaptive-pruning": False, "fedspine.share": 0.0},
    "chance": {"fedspine.allocation": "random"},
    "schedule": {"fedspine.allocation": "fixed"},
    "schedule, rank 2": {"fedspine.allocation": "fixed", "fedspine.rank": 2},
    "FedAPT": {"fedspine.allocation": "fixed", "fedspine.score": "mask", "fedspine.eta": 0.85},
    "schedule, zero-fill": {"fedspine.allocation": "fixed", "fedspine.aggregation": "zero-fill"},
}
"""Settings of FedSpine by name."""
UNPRUNED: dict[str, dict[str, Any]] = {
    "FedPETuning": {"method": "fedpetuning", "lora.merge": True},
    "HetLoRA": {"method": "hetlora", "hetlora.ranks": "8,8,8,4,4,4,2,2,2,2"},
}
"""LoRA of the whole model, for the perplexity that pruning costs; ranks by what the fleet's devices can do."""
CUT_FIRST = {"method": "llm-pruner", "llm-pruner.selection": "block", "data.windows": WINDOWS}
MERGED = {"method": "fedpetuning", "lora.merge": True, "evaluation.every": 0}
PRUNED_FIRST = "LLM-Pruner, then FedPETuning"
"""One smaller model for all, cut before the rounds begin; what the cut itself takes is not counted."""
CUT_LAST = {**CUT_FIRST, "llm-pruner.element": "squared", "llm-pruner.selection": "search"}
PRUNED_LAST = "FedPETuning, then Mask Tuning"
"""One smaller model for all, cut when the rounds are over (FedLoRA + Prune), by the search of Mask Tuning alone."""
REFINED_LAST = "FedPETuning, then all of Mask Tuning"
"""The same, rearranged and rescaled too."""
CUTS_LAST: dict[str, tuple[str, dict[str, Any]]] = {
    PRUNED_LAST: ("Mask Tuning", CUT_LAST),
    REFINED_LAST: ("all of Mask Tuning", {**CUT_LAST, "llm-pruner.rearrange": "all", "llm-pruner.rescale": "all"}),
}
"""Name of the run and settings of each."""
KEYS = ("seed", "sparsity", "model", "text")
FIGURES = ("perplexity", "worst", "pruned", "virtual_seconds", "waiting_seconds", "megabytes_up", "megabytes_down")
MEGA = 1e6


def dealt_to_devices(texts: Sequence[Path], folder: Path) -> list[Path]:
    """A part of a text for each device, the domains in turn.

    Raises
    ------
    Mistake
        A text cannot be read.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for device in range(DEVICES):
        text = texts[device % len(texts)]
        sharing = range(device % len(texts), DEVICES, len(texts))
        try:
            lines = text.read_text(encoding="utf-8").splitlines(keepends=True)
        except OSError as error:
            raise Mistake(f"--private {text}: cannot be read ({error.strerror}); name the text of a domain") from None
        first, last = (place * len(lines) // len(sharing) for place in (device // len(texts), device // len(texts) + 1))
        files.append(folder / f"device-{device}.txt")
        files[-1].write_text("".join(lines[first:last]), encoding="utf-8")
    return files


def allocation(bench: Bench, rows: Rows) -> None:
    """Every choice at every share, and LoRA of the whole model once."""
    for seed in bench.seeds:
        for name, changes in UNPRUNED.items():
            _measure(bench, rows, seed, 0.0, name, changes)
        for share in SHARES:
            first = {**CUT_FIRST, "llm-pruner.share": share, "data.window-tokens": TRAINED["data.window-tokens"]}
            made = bench.run(f"{seed}-{share:g}-LLM-Pruner", {**first, **_text(bench, seed)})
            _measure(bench, rows, seed, share, PRUNED_FIRST, {"method": "fedpetuning", "model": str(made / "model")})
            whole = bench.run(f"{seed}-FedPETuning, merged", {**TRAINED, "lora.merge": True, **MERGED, **_text(bench, seed)})
            for name, (run, how) in CUTS_LAST.items():
                last = {**how, "llm-pruner.share": share, "data.window-tokens": TRAINED["data.window-tokens"]}
                cut = bench.run(f"{seed}-{share:g}-{run}", {**last, "model": str(whole / "model"), **_text(bench, seed)})
                _add(bench, rows, seed, share, name, cut)
        for share, (name, changes) in product(SHARES, CHOICES.items()):
            own = {"method": "fedspine", "fedspine.share": share, "fedspine.fleet": FLEET, "fedspine.keep-models": False}
            _measure(bench, rows, seed, share, name, own | changes | {"evaluation.local-only": True})


def curves_of(rows: Rows) -> Rows:
    """The rows of the file beside, with what was measured between rounds."""
    return Rows(rows.path.with_name(f"{rows.path.stem}-curves.csv"), curves.KEYS, curves.FIGURES, rows.conditions)


def _text(bench: Bench, seed: int) -> dict[str, Any]:
    return {"seed": seed, "num-clients": len(bench.private), "data.source": "text", "data.path": str(bench.dealt())}


def _measure(bench: Bench, rows: Rows, seed: int, share: float, name: str, changes: dict[str, Any]) -> None:
    if not rows.missing(iter(_cells(bench, seed, share, name))):
        return
    varied = {**TRAINED, **changes, **_text(bench, seed)}
    run, fleet = bench.run(f"{seed}-{share:g}-{name.replace('/', '')}", varied), fleet_of(FLEET)
    assert fleet is not None
    curves.add_curve(curves_of(rows), seed, share, name, run, parse({**bench.common, **varied}), fleet)
    _add(bench, rows, seed, share, name, run)


def _cells(bench: Bench, seed: int, share: float, name: str) -> list[dict[str, Any]]:
    texts = [entry.partition("=")[0] for entry in bench.common["evaluation.texts"].split(",")]
    return [{"seed": seed, "sparsity": share, "model": name, "text": text} for text in texts]


def _add(bench: Bench, rows: Rows, seed: int, share: float, name: str, run: Path) -> None:
    """Write down what a run ended with; ``dense`` is the model that it began with, which of all but one is the same."""
    document = json.loads((run / "summary.json").read_text())
    metrics = {metric["dataset"]: metric["values"] for metric in document["metrics"]}
    figures = {f"megabytes_{way}": document[f"bytes_{way}"] / len(bench.private) / MEGA for way in ("up", "down")}
    figures |= _of_devices(run, document)
    for cell in rows.missing(iter(_cells(bench, seed, share, name))):
        text, dense = cell["text"], {**cell, "sparsity": 0.0, "model": DENSE}
        if rows.missing(iter([dense])):
            rows.add(dense, perplexity=metrics[text]["dense"], **dict.fromkeys(FIGURES[1:]))
        own = [client["metrics"].get(f"perplexity/{text}/federated") for client in document["clients"]]
        known = [value for value in own if value is not None] or [metrics[text]["federated"]]
        rows.add(cell, perplexity=fmean(known), worst=max(known), **figures)


def _of_devices(run: Path, document: dict[str, Any]) -> dict[str, float | None]:
    """How much they cut, and their times by the fleet's clock; nothing of methods that have none."""
    path = run / "refinements.json"
    if not path.exists():
        return dict.fromkeys(("pruned", "virtual_seconds", "waiting_seconds"))
    rounds = json.loads(path.read_text())["rounds"]
    return {
        "pruned": fmean(client["metrics"]["pruned"] for client in document["clients"] if "pruned" in client["metrics"]),
        "virtual_seconds": document["virtual_seconds"],
        "waiting_seconds": fmean(note["waiting_seconds"] for note in rounds),
    }


ALLOCATION = Study(
    "FedSpine: who chooses ratios and ranks", KEYS, FIGURES,
    allocation,  # type: ignore[arg-type]
    tuple(Pair(BANDIT, name) for name in CHOICES if name != BANDIT),
)  # fmt: skip
