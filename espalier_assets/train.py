"""Train the demo model on the documentation text of the running Python.

    python -m espalier_assets.train --out demo           # about 25 minutes on 2 cores
    python -m espalier_assets.train --out /tmp/tiny --steps 2   # test that it runs

The tokenizer is a byte-level BPE with 2048 tokens. The model is a LLaMA with grouped-query
attention: 6 blocks, hidden size 256, 8 heads with 4 key-value heads, feed-forward width 448, tied
embeddings, 3.8 million parameters. Training uses AdamW, a cosine schedule and sequences of 256
tokens.

Held-out passages (``espalier.data.passages``) are never trained on. The weights with the lowest
held-out loss are saved. A report is written to ``<out>.json``, next to the directory.
"""

import argparse
import json
import math
import platform
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from espalier.data import passages
from espalier.data.builtin import documentation

VOCABULARY = 2048
SAMPLE = 256


def read_text() -> tuple[list[str], list[str]]:
    """Return the calibration and held-out passages of all documentation sources."""
    return passages.split(
        text for source in documentation.SOURCES for text in documentation.texts(source)
    )


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer with ``<s>`` and ``</s>``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def new_model() -> LlamaForCausalLM:
    """Return a LLaMA with random weights and 3.8 million parameters."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=448,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=SAMPLE,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        attention_dropout=0.1,
    )
    return LlamaForCausalLM(config)


def held_out_loss(model: LlamaForCausalLM, samples: torch.Tensor) -> float:
    """Return the mean next-token loss in nats over non-overlapping sequences, shape (n, WINDOW)."""
    model.eval()
    with torch.no_grad():
        losses = [
            model(input_ids=batch, labels=batch).loss.item() * len(batch)
            for batch in samples.split(16)
        ]
    model.train()
    return sum(losses) / len(samples)


def train(
    model: LlamaForCausalLM, tokens: torch.Tensor, held_out: torch.Tensor, steps: int, batch: int
) -> dict:
    """Train the model in place, and keep the weights with the lowest held-out loss.

    Parameters
    ----------
    model : model with random weights
    tokens : (num_tokens,), int64, training text
    held_out : (n, WINDOW), int64, held-out sequences
    steps : number of training steps
    batch : number of sequences per step

    Returns
    -------
    dict
        Number of steps, best step, and its held-out perplexity
    """
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.95))
    warmup = max(1, steps // 20)
    # Linear warm-up, then cosine decay to 2% of the learning rate.
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda s: min(
            (s + 1) / warmup, 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1, s / steps)))
        ),
    )
    best_loss = math.inf
    best_step = 0
    best = None
    for step in range(1, steps + 1):
        starts = torch.randint(len(tokens) - SAMPLE - 1, (batch,))
        samples = torch.stack([tokens[s : s + SAMPLE] for s in starts])
        loss = model(input_ids=samples, labels=samples).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == steps:
            seen = held_out_loss(model, held_out)
            print(
                f"step {step}/{steps}  loss {loss.item():.3f}  held-out {seen:.3f}  ppl"
                f" {math.exp(seen):.2f}",
                flush=True,
            )
            if seen < best_loss:
                best_loss = seen
                best_step = step
                best = {name: value.clone() for name, value in model.state_dict().items()}
    if best is not None:
        model.load_state_dict(best)
    return {
        "steps": steps,
        "best_step": best_step,
        "held_out_perplexity": round(math.exp(best_loss), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--out", type=Path, required=True, help="directory to write, in Hugging Face layout"
    )
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    started = time.monotonic()
    torch.manual_seed(arguments.seed)
    calibration, held_out = read_text()
    tokenizer = train_tokenizer(calibration)

    def samples_of(parts: list[str]) -> torch.Tensor:
        return torch.tensor(tokenizer("\n\n".join(parts))["input_ids"])

    tokens = samples_of(calibration)
    held = samples_of(held_out)
    held = held[: len(held) // SAMPLE * SAMPLE].view(-1, SAMPLE)
    model = new_model()
    print(
        f"{model.num_parameters():,} parameters, {len(tokens):,} training tokens, {held.numel():,}"
        " held out",
        flush=True,
    )
    report = train(model, tokens, held, arguments.steps, arguments.batch)

    # Dropout was only for training.
    model.config.attention_dropout = 0.0
    model.to(torch.bfloat16).save_pretrained(arguments.out)
    tokenizer.save_pretrained(arguments.out)
    report |= {
        "parameters": model.num_parameters(),
        "training_tokens": len(tokens),
        "held_out_tokens": held.numel(),
        "batch": arguments.batch,
        "seed": arguments.seed,
        "seconds": round(time.monotonic() - started),
        "python": platform.python_version(),
        "torch": torch.__version__.split("+")[0],
    }
    arguments.out.with_suffix(".json").write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
