"""Methods that make a model smaller or sparser, with and without tuning, one client per domain.

Every cell is a complete run of the app, followed by a run of ``fedpetuning`` on its result. Models
are kept in the working directory, so that an interrupted study continues there and ``latency``
finds them.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.reporting.paired_comparison import Pair
from benchmarks.reporting.perplexity_report import Study
from benchmarks.reporting.rows import Rows
from benchmarks.smaller.bench import SAMPLES, Bench
from espalier.hf.machine.computing import Computing
from espalier.hf.opening.opened_model import open_model
from espalier.hf.whole.model import load_whole

SHARES = (0.2, 0.5)
METHODS: dict[str, dict[str, Any]] = {
    "FLAP": {"method": "flap", "pruning.ratio": None},
    "LLM-Pruner": {"method": "llm-pruner", "pruning.ratio": None, "pruning.selection": "block"},
    "LLM-Streamline": {
        "method": "llm-streamline", "pruning.ratio": None, "llm-streamline.learning-rate": 1e-3,
        "llm-streamline.steps": 20, "llm-streamline.batch-size": 4,
    },
    "LLM-Streamline, no layer": {
        "method": "llm-streamline", "pruning.ratio": None, "llm-streamline.replacement": "none",
    },
    "SliceGPT": {"method": "slicegpt", "slicegpt.width-pruning-ratio": None},
    "FedPrLLM": {"method": "fedprllm", "pruning.sparsity": None},
    "FedSpaLLM": {"method": "fedspallm", "pruning.sparsity": None},
    "pooled pruning": {"method": "pooled-pruning", "pruning.sparsity": None},
}  # fmt: skip
"""Settings by name; None stands for the pruning ratio or sparsity."""
SPARSE = ("FedPrLLM", "FedSpaLLM", "pooled pruning")
TUNING = {
    "method": "fedpetuning", "federation.rounds": 2, "training.steps": 15, "training.batch-size": 4,
    "training.learning-rate": 2e-3, "lora.targets": "all", "lora.merge": True,
    "data.sequence-length": 128,
}  # fmt: skip
DENSE = "dense"
TUNED = ", tuned"
FIGURES = (
    "perplexity",
    "megabytes_up",
    "megabytes_down",
    "megabytes_on_disk",
    "million_parameters",
)
MEGA = 1e6


def recovery(bench: Bench, rows: Rows) -> None:
    """Measure perplexity per domain, bytes and size, for all methods and ratios.

    The dense model is tuned too, because a tuned smaller model has also seen the clients' text.
    """
    for seed in bench.seeds:
        tuned_dense = {"seed": seed, "sparsity": 0.0, "model": f"{DENSE}{TUNED}"}
        if _missing(bench, rows, tuned_dense):
            run = bench.run(f"{seed}-{DENSE}{TUNED}", {**TUNING, **_text(bench, seed)})
            _add(bench, rows, {"seed": seed, "sparsity": 0.0, "model": DENSE}, [run], "dense")
            _add(bench, rows, tuned_dense, [run])
    for seed, share, name in product(bench.seeds, SHARES, METHODS):
        cells = [
            {"seed": seed, "sparsity": share, "model": f"{name}{tuned}"} for tuned in ("", TUNED)
        ]
        if not any(_missing(bench, rows, cell) for cell in cells):
            continue
        made = bench.run(
            _name(seed, share, name),
            {**_settings(name, share), **_text(bench, seed), "data.num-samples": SAMPLES},
        )
        keep = {"lora.keep-zeros": True} if name in SPARSE else {}
        varied = {**TUNING, **keep, **_text(bench, seed), "model": str(made)}
        tuned = bench.run(_name(seed, share, f"{name}{TUNED}"), varied)
        _add(bench, rows, cells[0], [made])
        _add(bench, rows, cells[1], [made, tuned])


def _settings(name: str, share: float) -> dict[str, Any]:
    return {key: share if value is None else value for key, value in METHODS[name].items()}


def _text(bench: Bench, seed: int) -> dict[str, Any]:
    return {
        "seed": seed,
        "num-clients": len(bench.private),
        "data.source": "files",
        "data.path": str(bench.dealt()),
    }


def _name(seed: int, share: float, name: str) -> str:
    return f"{seed}-{share:g}-{name}"


def _missing(bench: Bench, rows: Rows, cell: Mapping[str, Any]) -> bool:
    texts = [entry.partition("=")[0] for entry in bench.common["evaluation.texts"].split(",")]
    return bool(rows.missing({**cell, "text": text} for text in texts))


def _add(
    bench: Bench,
    rows: Rows,
    cell: Mapping[str, Any],
    runs: Sequence[Path],
    model: str = "federated",
) -> None:
    """Record the result of the last run, and the bytes of all runs."""
    documents = [json.loads((run / "summary.json").read_text()) for run in runs]
    clients = len(bench.private)
    up, down = (
        sum(document[way] for document in documents) / clients / MEGA
        for way in ("bytes_up", "bytes_down")
    )
    directory = open_model(bench.model).directory if model == DENSE else runs[-1] / "model"
    size = sum(file.stat().st_size for file in directory.glob("*.safetensors")) / MEGA
    parameters = open_model(str(directory)).plan.num_parameters / MEGA
    for metric in documents[-1]["metrics"]:
        found = {**cell, "text": metric["dataset"]}
        if rows.missing(iter([found])):
            rows.add(
                found,
                perplexity=metric["values"][model],
                megabytes_up=0.0 if model == DENSE else up,
                megabytes_down=0.0 if model == DENSE else down,
                megabytes_on_disk=size,
                million_parameters=parameters,
            )


# ----- groups that compete ------------------------------------------------------------------------

SELECTED: dict[str, dict[str, Any]] = {
    f"{name}, {selection}": {**METHODS[name], "pruning.selection": selection}
    for name in ("FLAP", "LLM-Pruner")
    for selection in ("global", "block", "kind")
}


def selections(bench: Bench, rows: Rows) -> None:
    """Measure FLAP and LLM-Pruner with each choice of groups that compete, without tuning."""
    for seed, share, name in product(bench.seeds, SHARES, SELECTED):
        cell = {"seed": seed, "sparsity": share, "model": name}
        if not _missing(bench, rows, cell):
            continue
        settings = {key: share if value is None else value for key, value in SELECTED[name].items()}
        varied = {**settings, **_text(bench, seed), "data.num-samples": SAMPLES}
        run = bench.run(_name(seed, share, name), varied)
        _add(bench, rows, {"seed": seed, "sparsity": 0.0, "model": DENSE}, [run], "dense")
        _add(bench, rows, cell, [run])


# ----- latency ------------------------------------------------------------------------------------

BATCH = 8
PROMPT = 256
NEW = 16
REPEATS = 7


def latency(bench: Bench, rows: Rows) -> None:
    """Measure the milliseconds of a prompt of 8 sequences, and of a token of one sequence.

    The models are those of the first seed, measured in turns.
    """
    seed = bench.seeds[0]
    shares = dict[tuple[float, str], Path]()
    shares[0.0, DENSE] = open_model(bench.model).directory
    for share, name in product(SHARES, METHODS):
        shares[share, name] = bench.made(_name(seed, share, name)) / "model"
    times: dict[tuple[float, str], list[tuple[float, float]]] = {key: [] for key in shares}
    wholes = {
        key: load_whole(open_model(str(path)), _computing(bench), "float32")
        for key, path in shares.items()
    }
    for _ in range(REPEATS):
        for key, whole in wholes.items():
            times[key].append(_times(whole))
    for (share, name), found in times.items():
        prefill, token = (1000 * median(one[place] for one in found) for place in range(2))
        cell = {"seed": seed, "sparsity": share, "model": name, "text": "any"}
        if rows.missing(iter([cell])):
            rows.add(cell, prefill_ms=prefill, token_ms=token)


def _computing(bench: Bench) -> Computing:
    return Computing(torch.device("cpu"), torch.float32, int(bench.common["threads"]))


@torch.no_grad()
def _times(whole: Any) -> tuple[float, float]:
    prompt = torch.arange(BATCH * PROMPT).view(BATCH, PROMPT) % 4000
    started = time.perf_counter()
    whole(input_ids=prompt, use_cache=False)
    prefill = time.perf_counter() - started
    how: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    one = prompt[:1, :32]
    seconds = []
    for new in (1, 1 + NEW):
        started = time.perf_counter()
        whole.generate(one, max_new_tokens=new, attention_mask=torch.ones_like(one), **how)
        seconds.append(time.perf_counter() - started)
    return prefill, (seconds[1] - seconds[0]) / NEW


def _pairs() -> Iterator[Pair]:
    for name in METHODS:
        yield Pair(f"{name}{TUNED}", name)
    for name in METHODS:
        if name != "FLAP":
            yield Pair(name, "FLAP")
            yield Pair(f"{name}{TUNED}", f"FLAP{TUNED}")


KEYS = ("seed", "sparsity", "model", "text")
STUDIES = {
    "recovery": Study(
        "Smaller and sparser models, before and after tuning", KEYS, FIGURES,
        recovery,
        tuple(_pairs()),
        variants={"": "before tuning", TUNED: "after tuning"},
    ),
    "selections": Study(
        "Groups that compete, in FLAP and LLM-Pruner", KEYS, FIGURES, selections,
    ),
    "latency": Study(
        "Time of smaller and sparser models", KEYS, ("prefill_ms", "token_ms"), latency,
    ),
}  # fmt: skip
