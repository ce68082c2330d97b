"""``adapter_config.json`` of an adapter in PEFT's format."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from espalier.environment.bounded_json import read_json_object
from espalier.environment.json_form import Form, require_form


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
