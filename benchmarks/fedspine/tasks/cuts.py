"""Baselines with one smaller model for all, cut by LLM-Pruner before or after the rounds of LoRA.

The cut uses public text. These baselines exist for language models only, because LLM-Pruner's
scores are gradients of the next-token loss.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.fedspine.tasks.compared_methods import CUT_FIRST, CUTS_LAST, PRUNED_FIRST
from benchmarks.smaller.bench import Bench
from espalier.evaluation.scores import score
from espalier.hf.machine.computing import Computing
from espalier.hf.opening.opened_model import open_model
from espalier.hf.whole.model import load_whole
from espalier.settings.run import parse
from server_app.public_tests import public_tests

FIRST = PRUNED_FIRST
LAST: Mapping[str, tuple[str, Mapping[str, Any]]] = CUTS_LAST
SEQUENCE_LENGTH = 128
OF_TUNING = ("training", "lora", "task", "federation")
"""Tables of settings that a cut does not use."""


def cut_model(
    bench: Bench,
    calibration: Path,
    share: float,
    seed: int,
    last: str = "",
    model: Path | None = None,
) -> Path:
    """Return the directory of the run that cut a model.

    Parameters
    ----------
    bench : settings and folder of the runs
    calibration : public text for the scores
    share : pruning ratio
    seed : seed of the run
    last : name of a cut after the rounds; empty for a cut before them
    model : directory of a tuned model; by default the bench's base model
    """
    name, how = LAST[last] if last else ("LLM-Pruner", CUT_FIRST)
    text = {
        "task.name": "text",
        "task.test-path": "",
        "data.source": "files",
        "data.partition": "iid",
    }
    own = {
        "seed": seed,
        "pruning.ratio": share,
        "data.sequence-length": SEQUENCE_LENGTH,
        "data.path": str(calibration),
    }
    chosen = {"model": str(model)} if model else {}
    common = {
        key: value for key, value in bench.common.items() if key.split(".")[0] not in OF_TUNING
    }
    rest = Bench(
        {**common, "evaluation.every": 0}, bench.model, bench.private, bench.seeds, bench.work
    )
    return rest.run(
        f"{seed}-{share:g}-{name}",
        {**text, **how, **own, **chosen, "num-clients": bench.common["num-clients"]},
    )


def score_of(bench: Bench, directory: Path, metric: str) -> float:
    """Return the score of a cut model on the task's items."""
    settings = parse({**bench.common, "method": "fedpetuning", "model": str(directory)})
    model = open_model(settings.model)
    tests = public_tests(settings, model)
    assert tests.encoded is not None
    device = torch.device("cpu")
    whole = load_whole(model, Computing(device, torch.float32, settings.threads), "float32")
    return score(whole, tests.encoded, False, settings.training.batch_size, device)[metric]
