"""Measurement of the rounding of summands, on a tiny model."""

import re
from pathlib import Path

import torch

from benchmarks.accuracy.summand_errors import flap_lines, pruner_lines, slicegpt_lines
from espalier.hf.opening.opened_model import OpenedModel
from espalier.settings.run import parse
from tests.tiny_model import save_tiny_llama


def test_sums_decide_as_floats_do(tmp_path: Path) -> None:
    model = OpenedModel(save_tiny_llama(tmp_path / "base"))
    drawn = torch.Generator().manual_seed(0)
    clients = [torch.randint(0, 20, (2, 16), generator=drawn) for _ in range(3)]
    common = {"num-clients": 3, "data.num-samples": 2}
    flap = list(flap_lines(model, parse({"method": "flap", **common}), clients))
    # Sums are nearer to float64 than float32 means are.
    errors = [float(re.search(r"up to (\S+) of", line)[1]) for line in flap]  # type: ignore[index]
    assert errors[1] < 1e-9 < errors[0]
    pruning = {"llm-pruner.spare-first": 0, "llm-pruner.spare-last": 0}
    run = parse({"method": "llm-pruner", "llm-pruner.element": "signed", **pruning, **common})
    (line,) = pruner_lines(model, run, clients)
    assert "; 0 of " in line
    run = parse({"method": "slicegpt", "slicegpt.multiple": 4, **common})
    (line,) = slicegpt_lines(model, run, clients)
    assert re.search(r"differ by up to \S+e-1\d;", line)
