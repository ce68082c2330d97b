"""Published models as their configurations describe them, and the size of adapters in them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.models.footprint import Footprint, footprint
from espalier.hf.opening.config_only_model import described
from espalier.hf.opening.opened_model import OpenedModel
from espalier.messages.tensor_blobs import packed_bytes, wire_specs
from espalier.models.adapters import AdapterPlan, adapter_plan
from espalier.models.plan import ModelPlan
from espalier.settings.tables.federation import WireDtype
from espalier.settings.tables.lora import LoraSettings

SHAPES: dict[str, dict[str, Any]] = {
    "llama-7b": {
        "model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
        "max_position_embeddings": 2048, "attention_bias": False, "mlp_bias": False,
        "tie_word_embeddings": False,
    },
    "llama3-8b": {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "max_position_embeddings": 8192, "attention_bias": False,
        "mlp_bias": False, "tie_word_embeddings": False,
    },
    "qwen2-7b": {
        "model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584,
        "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "max_position_embeddings": 131072, "tie_word_embeddings": False,
    },
    "mistral-7b": {
        "model_type": "mistral", "vocab_size": 32000, "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "max_position_embeddings": 32768, "sliding_window": 4096,
        "tie_word_embeddings": False,
    },
}  # fmt: skip
"""Entries of ``config.json`` that determine sizes, by name; Mistral is version 0.1."""


@dataclass(frozen=True)
class Tuned:
    """Model with adapters, known by its shapes."""

    config: Mapping[str, Any]
    plan: ModelPlan
    adapters: AdapterPlan

    @cached_property
    def footprint(self) -> Footprint:
        """Number of the base's parameters by place."""
        return footprint(self.config)

    @property
    def trained(self) -> int:
        """Number of parameters of the adapters."""
        return self.adapters.num_parameters

    def blob_bytes(self, wire_dtype: WireDtype) -> dict[str, int]:
        """Return the size of each blob with adapters by key, the same in both directions."""
        shapes = self.adapters.shapes()
        return {key: packed_bytes(wire_specs(own, wire_dtype)) for key, own in shapes.items()}


def tuned(name: str, lora: LoraSettings) -> Tuned:
    """Return a model of ``SHAPES`` with LoRA."""
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES[name]))
        with described(Path(folder)) as directory:
            plan = OpenedModel(directory).plan
    return Tuned(SHAPES[name], plan, adapter_plan(plan, lora))
