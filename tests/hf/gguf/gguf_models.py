"""Tiny models of which GGUF files are written, with tokenizers that llama.cpp has."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.hf.tiny_models import random_model, tiny_config
from tests.tiny_model import save_tokenizer

LLAMA_3: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama 3": ("llama", LLAMA_3),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {"use_sliding_window": False, "head_dim": 4}),
    "qwen3": ("qwen3", {"head_dim": 16}),
}
SIZES: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
}


def save(folder: Path, name: str, *, sentencepiece: bool = False) -> Path:
    """Save a random model with four blocks of width 32, and a tokenizer."""
    folder.mkdir(parents=True)
    size = save_like_llama_2(folder) if sentencepiece else save_tokenizer(folder)
    kind, changes = KINDS[name]
    # As in real models, the embedding has more rows than there are tokens.
    config = tiny_config(kind, **SIZES | changes, vocab_size=size + 4)
    random_model(config).save_pretrained(folder)
    return folder


def save_like_llama_2(folder: Path) -> int:
    """Save a BPE tokenizer with spaces as ``▁`` and bytes as a last resort; return its size."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    words = "the cat and the dog sat on the mat, then the other cat ran to the oak tree"
    trained.train_from_iterator([words, "a hat that the man had", "under the tall tree"], trainer)
    vocabulary = trained.get_vocab()
    state = models.BPE(
        vocab=vocabulary,
        merges=_merges(trained),
        unk_token="<unk>",
        byte_fallback=True,
        fuse_unk=True,
    )
    tokenizer = Tokenizer(state)
    tokenizer.normalizer = trained.normalizer
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    return len(vocabulary)


def _merges(tokenizer: Tokenizer) -> list[tuple[str, str]]:

    found = json.loads(tokenizer.to_str())["model"]["merges"]
    return [tuple(merge) for merge in found]
