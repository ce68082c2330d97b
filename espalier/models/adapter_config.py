"""Files of an adapter in PEFT's format: its configuration, and the labels that it brings."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from espalier.environment.bounded_json import read_json_object
from espalier.environment.json_form import Form, require_form
from espalier.errors import InputError

WEIGHTS = "adapter_model.safetensors"
HEADS = ("classifier.weight", "out_proj.weight")
"""Ends of the names of an encoder's last matrix, which has one row per label."""


class _AdapterConfig(Form):
    peft_type: str
    r: Annotated[int, Field(ge=1)]
    lora_alpha: float
    target_modules: str | list[str] | None = None
    base_model_name_or_path: str | None = None
    task_type: str | None = None


def read_adapter_config(path: Path) -> dict[str, Any]:
    """Return the contents of an ``adapter_config.json``; InputError if it is damaged."""
    config = read_json_object(path)
    require_form(_AdapterConfig, config, str(path), "copy the adapter again")
    return config


def num_labels_of(adapter: Path) -> int:
    """Return the number of labels of the classification head that an adapter brings.

    Raises InputError if it has none, or its file cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    path = adapter / WEIGHTS
    try:
        with safe_open(path, framework="numpy") as tensors:
            rows = [
                tensors.get_slice(name).get_shape()[0]
                for name in tensors.keys()  # noqa: SIM118
                if "lora_" not in name and name.endswith(HEADS)
            ]
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path}: cannot be read ({error}); copy the adapter again") from None
    if not rows:
        raise InputError(f"{adapter}: has no classification head; name a completed run")
    return int(rows[-1])
