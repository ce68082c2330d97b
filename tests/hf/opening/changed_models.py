"""Tiny models whose files are changed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from espalier.hf.machine.computing import Computing

SAMPLES = torch.arange(2, 34).view(2, 16)
WEIGHTS = "model.safetensors"
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
CPU = Computing(torch.device("cpu"), torch.float32, 1)
Change = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


def change_tensors(directory: Path, change: Change) -> None:
    save_file(change(load_file(directory / WEIGHTS)), directory / WEIGHTS, {"format": "pt"})


def change_config(directory: Path, **values: Any) -> None:
    """Change keys of ``config.json``; the value ``...`` removes a key."""
    path = directory / "config.json"
    document = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in document.items() if value is not ...}))
