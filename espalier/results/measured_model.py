"""Measurement of one model in this process; the request is read from stdin, JSON is printed.

Pruned models are built by Espalier's own code, so no code of a model's directory runs.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from espalier.hf.machine.machine_memory import peak_resident, resident
from espalier.results.sources import Source
from espalier.results.use.loading import loader_of

FIRST_TOKEN = 3
"""First token id of the prompt; lower ones are often special."""
MAX_SECONDS = 10.0
"""Time after which a call is not repeated, so that a large model does not take an hour."""
MIN_SECONDS = 0.5
"""Least time over which the fastest call is chosen, because load often lasts for many calls."""


def main() -> None:
    """Load the model, measure it and print the figures."""
    request = json.load(sys.stdin)
    threading.Thread(target=_end_with_parent, args=(request["parent"],), daemon=True).start()
    logging.set_verbosity_error()
    torch.set_num_threads(request["threads"])
    torch.manual_seed(0)
    print(json.dumps(measured(request)), flush=True)


def _end_with_parent(pipe: int) -> None:
    """Wait until the process that holds the other end of a pipe has ended, then end this one."""
    os.read(pipe, 1)
    os._exit(1)


@torch.inference_mode()
def measured(request: dict[str, Any]) -> dict[str, Any]:
    """Return memory in bytes, seconds to load, tokens per second, dtype and parameters.

    Memory is measured after the first pass, because files are read into memory when they are used.

    Parameters
    ----------
    request : ``model`` and, optionally, ``adapter``; ``prompt_tokens``, ``new_tokens``,
        ``repetitions`` and ``batch_size``; optionally ``dtype`` of the weights
    """
    # Imports of the libraries must not count as memory of the model.
    adapter = request.get("adapter")
    source = Source("measured", Path(request["model"]), adapter and Path(adapter))
    load = loader_of(source, request.get("dtype", "auto"))
    before = resident()
    started = time.perf_counter()
    model = load()
    load_seconds = time.perf_counter() - started
    prompt = _prompt(model, request)
    model(prompt)
    memory = resident() - before
    prompt_seconds = _seconds(lambda: model(prompt), request["repetitions"])
    return {
        "model_memory": memory,
        "peak_memory": peak_resident(),
        "load_seconds": load_seconds,
        "prompt_tokens_per_second": prompt.numel() / prompt_seconds,
        "new_tokens_per_second": _generation(model, prompt, request),
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


def _prompt(model: nn.Module, request: dict[str, Any]) -> Tensor:
    """Return random tokens, shape (batch_size, tokens), int64; fewer if the model has less room."""
    config: Any = model.config
    room = getattr(config, "max_position_embeddings", None) or request["prompt_tokens"]
    # Some encoders lose the first positions to padding.
    tokens = max(1, min(request["prompt_tokens"], room - request["new_tokens"] - FIRST_TOKEN))
    shape = (request["batch_size"], tokens)
    return torch.randint(min(FIRST_TOKEN, config.vocab_size - 1), config.vocab_size, shape)


def _generation(model: nn.Module, prompt: Tensor, request: dict[str, Any]) -> float | None:
    """Return generated tokens per second after the first one; None for a model that writes none."""
    if type(model).__name__.endswith("ForSequenceClassification"):
        return None
    whole: Any = model
    count = request["new_tokens"]

    def generate(number: int) -> Callable[[], Any]:
        options = {"max_new_tokens": number, "min_new_tokens": number, "do_sample": False}
        return lambda: whole.generate(
            input_ids=prompt, attention_mask=torch.ones_like(prompt), **options
        )

    # The first token also takes the pass over the prompt, which is measured apart.
    one = _seconds(generate(1), request["repetitions"])
    all_of_them = _seconds(generate(count), request["repetitions"])
    seconds = all_of_them - one
    return request["batch_size"] * (count - 1) / seconds if seconds > 0 else None


def _seconds(work: Callable[[], Any], repetitions: int) -> float:
    """Return the seconds of the fastest of several calls.

    Other work on the machine can only make a call slower. There are at least ``repetitions``, but
    no further ones after ``MAX_SECONDS``.
    """
    found: list[float] = []
    while not found or (
        sum(found) < MAX_SECONDS and (len(found) < repetitions or sum(found) < MIN_SECONDS)
    ):
        started = time.perf_counter()
        work()
        found.append(time.perf_counter() - started)
    return min(found)


if __name__ == "__main__":
    main()
