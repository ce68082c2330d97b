"""Pretraining of a small RoBERTa by masked-language modelling (Liu et al. 2019).

    python -m benchmarks.tuning.pretrain_encoder --text FILE --text FILE --out DIRECTORY
    # about ten minutes on a core
    python -m benchmarks.tuning.pretrain_encoder --text FILE --out DIRECTORY --steps 2 --hidden 32
    # a quick check

The tokenizer is trained too. The text should differ from that of the task for which the encoder is
tuned. The recipe: lower-case byte-level BPE, sequences of 64 tokens, 15% of them chosen anew in
every step (80% of these are masked, 10% replaced, 10% kept), AdamW with a cosine schedule. Held-out
passages (``espalier.data.passages``) are not used in training. The losses, with that of a
unigram model for comparison, are written to ``<out>.json``.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from espalier.data import passages
from espalier.errors import EspalierError, InputError
from espalier.seeds import derive_seed

SPECIAL = {
    "bos_token": "<s>",
    "pad_token": "<pad>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "mask_token": "<mask>",
}
"""Special tokens in RoBERTa's order.

Their ids are 0 to 4; the configuration below uses three of these ids.
"""
CHOSEN = 0.15
MASKED = 0.8
REPLACED = 0.1
"""Fraction of the chosen tokens that is replaced.

``CHOSEN`` is the fraction of tokens that are predicted, ``MASKED`` the fraction of these that is
masked.
"""
NOT_CHOSEN = -100
MAX_HELD_OUT = 512
"""Maximum number of held-out sequences for the loss, equally spaced."""


@dataclass(frozen=True)
class Recipe:
    """Sizes of the model, and length of its training."""

    vocabulary: int = 6000
    hidden: int = 128
    layers: int = 4
    heads: int = 4
    tokens: int = 64
    """Tokens of a sequence, including ``<s>`` and ``</s>``."""
    longest: int = 128
    """Maximum number of tokens that the encoder can read.

    Positions beyond ``tokens`` stay untrained.
    """
    steps: int = 1500
    batch: int = 32
    learning_rate: float = 2e-3
    seed: int = 0


def train_tokenizer(texts: Sequence[str], vocabulary: int) -> Any:
    """Train a lower-case byte-level BPE tokenizer with RoBERTa's special tokens around a text.

    It is returned as a Hugging Face tokenizer.
    """
    from tokenizers import (
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
        trainers,
    )
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> </s> $B </s>",
        special_tokens=[("<s>", 0), ("</s>", 2)],
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL)


def sequences(tokenizer: Any, texts: Sequence[str], tokens: int) -> Tensor:
    """Return the concatenated texts as ``<s> ... </s>`` of ``tokens`` tokens.

    Shape (sequences, tokens), int64.
    """
    ids = [
        token
        for row in tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        for token in row
    ]
    inner = tokens - 2
    rows = torch.tensor(ids[: len(ids) // inner * inner], dtype=torch.int64).view(-1, inner)
    begin = rows.new_full((len(rows), 1), 0)
    end = rows.new_full((len(rows), 1), 2)
    return torch.cat([begin, rows, end], dim=1)


def hidden_from(rows: Tensor, vocabulary: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return a model's inputs and targets (RoBERTa, section 2.2).

    Both are (B, T), int64; targets are ``NOT_CHOSEN`` for tokens that are not predicted. Special
    tokens are neither chosen nor used as replacements.
    """
    chosen = (torch.rand(rows.shape, generator=generator) < CHOSEN) & (rows >= len(SPECIAL))
    fate = torch.rand(rows.shape, generator=generator)
    strangers = torch.randint(len(SPECIAL), vocabulary, rows.shape, generator=generator)
    mask = list(SPECIAL).index("mask_token")
    given = torch.where(chosen & (fate < MASKED), mask, rows)
    given = torch.where(chosen & (fate >= MASKED) & (fate < MASKED + REPLACED), strangers, given)
    return given, torch.where(chosen, rows, NOT_CHOSEN)


def new_model(recipe: Recipe) -> Any:
    """Return a RoBERTa with random weights from the recipe's seed."""
    from transformers import RobertaConfig, RobertaForMaskedLM

    config = RobertaConfig(
        vocab_size=recipe.vocabulary,
        hidden_size=recipe.hidden,
        intermediate_size=4 * recipe.hidden,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        # RoBERTa's positions start after the padding index.
        max_position_embeddings=recipe.longest + 2,
        bos_token_id=0,
        pad_token_id=1,
        eos_token_id=2,
        # No dropout: the text is hardly seen twice.
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derive_seed(recipe.seed, "encoder"))
        return RobertaForMaskedLM(config)


def masked_loss(model: Any, given: Tensor, wanted: Tensor) -> Tensor:
    """Return the mean cross entropy in nats over the chosen tokens.

    The head computes logits for these tokens only.
    """
    asked = wanted != NOT_CHOSEN
    hidden = model.roberta(input_ids=given).last_hidden_state[asked]
    return nn.functional.cross_entropy(model.lm_head(hidden), wanted[asked])


@torch.no_grad()
def held_out_loss(model: Any, rows: Tensor, recipe: Recipe) -> float:
    """Return ``masked_loss`` over all rows, each masked once, with the recipe's seed."""
    model.eval()
    given, wanted = hidden_from(rows, recipe.vocabulary, _generator(recipe, "held out"))
    total = 0.0
    number = int((wanted != NOT_CHOSEN).sum())
    for inputs, labels in zip(given.split(256), wanted.split(256), strict=True):
        count = int((labels != NOT_CHOSEN).sum())
        total += float(masked_loss(model, inputs, labels)) * count if count else 0.0
    model.train()
    return total / number


def unigram_loss(rows: Tensor, held_out: Tensor, recipe: Recipe) -> float:
    """Return the same loss for a unigram model of ``rows`` with add-one counts."""
    counts = (
        torch.bincount(rows[rows >= len(SPECIAL)], minlength=recipe.vocabulary)[
            len(SPECIAL) :
        ].double()
        + 1
    )
    _, wanted = hidden_from(held_out, recipe.vocabulary, _generator(recipe, "held out"))
    return float(-(counts / counts.sum()).log()[wanted[wanted != NOT_CHOSEN] - len(SPECIAL)].mean())


def pretrain(model: Any, rows: Tensor, recipe: Recipe) -> None:
    """Train the model in place; each step draws rows at random."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.98))
    generator = _generator(recipe, "steps")
    warmup = max(1, recipe.steps // 20)
    model.train()
    for step in range(recipe.steps):
        chosen = torch.randint(len(rows), (recipe.batch,), generator=generator)
        loss = masked_loss(model, *hidden_from(rows[chosen], recipe.vocabulary, generator))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        falling = (1 + math.cos(math.pi * step / recipe.steps)) / 2
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * min((step + 1) / warmup, falling)
        optimizer.step()
        if (step + 1) % 50 == 0:
            print(f"step {step + 1}/{recipe.steps}  loss {loss.item():.3f}", flush=True)


def _generator(recipe: Recipe, purpose: str) -> torch.Generator:
    return torch.Generator().manual_seed(derive_seed(recipe.seed, f"encoder/{purpose}"))


def make_encoder(texts: Sequence[str], recipe: Recipe, out: Path) -> dict[str, Any]:
    """Train tokenizer and encoder on texts, write both to ``out``, and return the report.

    Raises
    ------
    InputError
        The texts have too few passages for training and held-out data, or their vocabulary size is
        not that of the recipe.
    """
    started = time.monotonic()
    training, held = passages.split(texts)
    tokenizer = train_tokenizer(training, recipe.vocabulary)
    if len(tokenizer) != recipe.vocabulary:
        raise InputError(
            f"--text: gives a vocabulary of {len(tokenizer)} tokens, --vocabulary is"
            f" {recipe.vocabulary}; lower it"
        )
    rows, held_rows = (sequences(tokenizer, part, recipe.tokens) for part in (training, held))
    held_rows = held_rows[:: max(1, len(held_rows) // MAX_HELD_OUT)][:MAX_HELD_OUT]
    if not (len(rows) and len(held_rows)):
        raise InputError(
            f"--text: gives {len(rows)} sequences to train on and {len(held_rows)} held out; give"
            " more text"
        )
    model = new_model(recipe)
    print(
        f"{model.num_parameters():,} parameters, {len(rows):,} sequences, {len(held_rows):,}"
        " held out",
        flush=True,
    )
    pretrain(model, rows, recipe)
    report = {
        **asdict(recipe),
        "parameters": model.num_parameters(),
        "training_sequences": len(rows),
        "held_out_sequences": len(held_rows),
        "held_out_loss": round(held_out_loss(model, held_rows, recipe), 4),
        "unigram_loss": round(unigram_loss(rows, held_rows, recipe), 4),
        "seconds": round(time.monotonic() - started),
    }
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    out.with_suffix(".json").write_text(json.dumps(report, indent=2) + "\n")
    return report


def main() -> int:
    """Read the texts, train, and print the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--text", type=Path, action="append", required=True, help="plain text, UTF-8"
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="directory to write, in Hugging Face layout"
    )
    parser.add_argument("--threads", type=int, default=2)
    for name, value in asdict(Recipe()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    given = vars(parser.parse_args())
    files = given.pop("text")
    out = given.pop("out")
    torch.set_num_threads(given.pop("threads"))
    try:
        if missing := [str(file) for file in files if not file.is_file()]:
            raise InputError(f"--text {', '.join(missing)}: is no file")
        report = make_encoder([file.read_text() for file in files], Recipe(**given), out)
    except EspalierError as error:
        print(f"{error}", file=sys.stderr)
        return 2
    print(
        f"held-out masked loss {report['held_out_loss']}, unigrams {report['unigram_loss']},"
        f" {report['seconds']} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
