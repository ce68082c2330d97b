"""Lines of Python and shell that load, serve and evaluate what a run wrote."""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from espalier.environment.bounded_json import read_json_object
from espalier.results.finished_run import ADAPTER_CONFIG, FinishedRun

CLASSIFIER = "AutoModelForSequenceClassification"
DECODER = "AutoModelForCausalLM"
QUESTION = "Once upon a time"
CONFIG = "config.json"


@dataclass(frozen=True)
class Snippet:
    """Lines to copy."""

    title: str
    text: str
    """The lines; may be empty."""
    note: str = ""
    """Sentence that explains the lines."""


def snippets_of(run: FinishedRun) -> list[Snippet]:
    """Return the lines for each result of a run; empty if it wrote none."""
    return list(_snippets(run))


def _snippets(run: FinishedRun) -> Iterator[Snippet]:
    loader = DECODER
    if run.client_models:
        name, folder = next(iter(run.client_models.items()))
        loader = _loader(folder)
        yield _model(folder, loader, f"the model of {name}; each client has its own in clients/")
    elif run.model is not None:
        loader = _loader(run.model)
        yield _model(run.model, loader, "the model")
    elif run.adapter is not None:
        loader = _adapter_loader(run.adapter)
        yield _adapter(run.adapter, loader)
    else:
        return
    if loader == DECODER:
        yield from _commands(run)


def _loader(folder: Path) -> str:
    return CLASSIFIER if _classifies(_config(folder).get("architectures")) else DECODER


def _config(folder: Path) -> dict[str, Any]:
    return read_json_object(folder / CONFIG)


def _model(folder: Path, loader: str, what: str) -> Snippet:
    """Return the lines for a model; one with layers of its own shapes brings its code."""
    remote = "auto_map" in _config(folder)
    trust = ", trust_remote_code=True" if remote else ""
    note = (
        "Its layers have other shapes than transformers' own, so its directory has the code that"
        " builds them."
        if remote
        else ""
    )
    return Snippet(
        f"Load {what}",
        f"from transformers import AutoTokenizer, {loader}\n\n"
        f"path = {_text(folder)}\n"
        "tokenizer = AutoTokenizer.from_pretrained(path)\n"
        f"model = {loader}.from_pretrained(path{trust})\n{_use(loader)}",
        note,
    )


def _adapter_loader(folder: Path) -> str:
    kind = read_json_object(folder / ADAPTER_CONFIG).get("task_type")
    return CLASSIFIER if kind == "SEQ_CLS" else DECODER


def _adapter(folder: Path, loader: str) -> Snippet:
    """Return the lines for an adapter; its base may be a pruned model that brings its code."""
    base = str(read_json_object(folder / ADAPTER_CONFIG).get("base_model_name_or_path"))
    file = Path(base) / CONFIG
    remote = file.is_file() and "auto_map" in read_json_object(file)
    options = ", trust_remote_code=True" if remote else ""
    if loader == CLASSIFIER:
        options += ", num_labels=..."
    peft = loader.replace("Auto", "AutoPeft", 1)
    return Snippet(
        "Load the adapter on its base model",
        f"from peft import {peft}\n"
        "from transformers import AutoTokenizer\n\n"
        f"path = {_text(folder)}\n"
        f"tokenizer = AutoTokenizer.from_pretrained({_text(base)})\n"
        f"model = {peft}.from_pretrained(path{options})\n{_use(loader)}",
        "num_labels is the number of classes of the task." if loader == CLASSIFIER else "",
    )


def _commands(run: FinishedRun) -> Iterator[Snippet]:
    """Yield the commands that talk to a language model, evaluate it and export it."""
    path = shlex.quote(str(run.path))
    yield Snippet(
        "Talk to it", f"espalier chat {path} --compare", "The base model answers beside it."
    )
    yield Snippet(
        "Evaluate it on a public benchmark",
        f"espalier eval {path} --tasks arc_easy,hellaswag --with-base",
        "This needs lm-evaluation-harness (extra lm-eval), which downloads the tasks.",
    )
    yield Snippet(
        "Serve it",
        f"espalier export {path} --to transformers --out served\ntransformers serve served\n\n"
        f"espalier export {path} --to gguf --out served-gguf",
        "The first two lines start an HTTP server of transformers (its extra serving), for models"
        " that need no code of their own. The last writes a file for llama.cpp and Ollama (extra"
        " gguf). The page Serve a result says what works for each method.",
    )


def _classifies(architectures: object) -> bool:
    names = architectures if isinstance(architectures, list) else []
    return any(str(name).endswith("ForSequenceClassification") for name in names)


def _use(loader: str) -> str:
    tokens = f'tokens = tokenizer("{QUESTION}", return_tensors="pt")\n'
    if loader == CLASSIFIER:
        return f"{tokens}print(model(**tokens).logits.argmax(-1))"
    return (
        f"{tokens}answer = model.generate(**tokens, max_new_tokens=50)\n"
        "print(tokenizer.decode(answer[0]))"
    )


def _text(value: Path | str) -> str:
    return repr(str(value))
