"""Tiny LLaMA and RoBERTa with random weights and their own tokenizers, in Hugging Face layout."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForMaskedLM,
)

WORDS = [
    "alder",
    "birch",
    "cedar",
    "damson",
    "elder",
    "fir",
    "gorse",
    "hazel",
    "ivy",
    "juniper",
    "larch",
    "maple",
    "oak",
]


def save_tokenizer(folder: Path) -> int:
    """Save a byte-level tokenizer and return the size of its vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<s>"], show_progress=False
    )
    tokenizer.train_from_iterator([" ".join(WORDS) * 3], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>").save_pretrained(folder)
    return tokenizer.get_vocab_size()


def save_tiny_llama(
    folder: Path,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    positions: int = 64,
    blocks: int = 2,
    hidden: int = 16,
    feed_forward: int = 24,
    std: float = 0.3,
) -> Path:
    """Save a LLaMA with grouped-query attention: 4 heads in 2 groups."""
    vocabulary = save_tokenizer(folder)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=feed_forward,
        num_hidden_layers=blocks,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=std)
    model.to(dtype).save_pretrained(folder)
    return folder


def save_tiny_roberta(
    folder: Path, seed: int = 0, hidden: int = 64, heads: int = 4, feed_forward: int = 64
) -> Path:
    """Save a RoBERTa of two blocks as a masked language model, with a word-level tokenizer."""
    special = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    vocabulary = {word: place for place, word in enumerate([*special.values(), *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    config = RobertaConfig(
        vocab_size=len(vocabulary),
        hidden_size=hidden,
        intermediate_size=feed_forward,
        num_hidden_layers=2,
        num_attention_heads=heads,
        max_position_embeddings=64,
        pad_token_id=1,
        hidden_dropout_prob=0.0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        RobertaForMaskedLM(config).save_pretrained(folder)
    return folder
