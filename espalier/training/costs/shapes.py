"""Shapes of published models: those entries of ``config.json`` that determine sizes."""

from collections.abc import Mapping
from typing import Any

from espalier.environment.home_folder import at_home
from espalier.errors import InputError
from espalier.hf.opening.config_file import read_config

SHAPES: dict[str, dict[str, Any]] = {
    "llama-7b": {
        "model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 2048, "attention_bias": False,
        "mlp_bias": False, "tie_word_embeddings": False,
    },
    "llama3-8b": {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192, "attention_bias": False,
        "mlp_bias": False, "tie_word_embeddings": False,
    },
    "qwen2-7b": {
        "model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "max_position_embeddings": 131072, "tie_word_embeddings": False,
    },
    "mistral-7b": {
        "model_type": "mistral", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 32768,
        "sliding_window": 4096, "tie_word_embeddings": False,
    },
    "roberta-base": {
        "model_type": "roberta", "vocab_size": 50265, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
        "num_attention_heads": 12, "max_position_embeddings": 514, "type_vocab_size": 1, "pad_token_id": 1,
    },
}  # fmt: skip
"""Configurations by name.

Qwen2 has biases in the query, key and value projections, RoBERTa in all linears, the others in
none. Mistral is version 0.1; version 0.3 has 768 more tokens. RoBERTa's embeddings are tied to a
language-model head, which tuning for classification leaves out.
"""


def configuration(model: str) -> Mapping[str, Any]:
    """Return the configuration of a known shape, or of a directory with a ``config.json``.

    The directory does not need weights.

    Raises
    ------
    InputError
        The model is neither, or the file cannot be read.
    """
    if model in SHAPES:
        return SHAPES[model]
    path = at_home(model) / "config.json"
    if not path.is_file():
        known = ", ".join(SHAPES)
        raise InputError(
            f"--model {model!r}: is no known shape ({known}), and no directory with a config.json;"
            " name one of them"
        )
    return read_config(path)
