"""Seconds of two models in this process, in turns; the request is read from stdin, JSON is printed.

Both models are loaded. In each turn the first and then the second reads the same prompt and writes
the same number of tokens, so that other load on the machine slows down both.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from espalier.hf.opening.opened_model import opened_in
from espalier.hf.structured.configuration import load_config


@torch.inference_mode()
def main() -> None:
    """Measure both models and print the seconds of each turn."""
    request = json.load(sys.stdin)
    torch.set_num_threads(request["threads"])
    models = [_loaded(Path(path), request["dtype"]) for path in request["models"]]
    generator = torch.Generator().manual_seed(0)
    vocabulary = min(model.config.vocab_size for model in models)
    shape = (1, request["prompt_tokens"])
    prompt = torch.randint(vocabulary, shape, generator=generator)
    found: list[list[dict[str, float]]] = [[], []]
    # The first turn warms caches and is left out.
    for turn in range(request["turns"] + 1):
        for model, own in zip(models, found, strict=True):
            seconds = _seconds(model, prompt, request["new_tokens"])
            if turn:
                own.append(seconds)
    print(json.dumps(found), flush=True)


def _loaded(directory: Path, dtype: str) -> Any:
    import transformers

    transformers.utils.logging.set_verbosity_error()
    auto = getattr(transformers, opened_in(directory).family.auto_class)
    model = auto.from_pretrained(
        directory, config=load_config(directory), dtype=getattr(torch, dtype)
    )
    return model.eval()


def _seconds(model: Any, prompt: Tensor, count: int) -> dict[str, float]:
    """Return the seconds of the prompt and of each token after the first."""
    started = time.perf_counter()
    output = model(prompt, use_cache=True, logits_to_keep=1)
    read = time.perf_counter()
    for _ in range(count):
        token = output.logits[:, -1:].argmax(-1)
        output = model(token, past_key_values=output.past_key_values, use_cache=True)
    return {"prefill": read - started, "decode": (time.perf_counter() - read) / count}


if __name__ == "__main__":
    main()
