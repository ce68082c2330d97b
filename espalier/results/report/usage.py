"""Lines of Python and shell that load, serve and evaluate what a run wrote."""

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from espalier.environment.bounded_json import read_json_object
from espalier.environment.json_form import Form, require_form
from espalier.hf.export.loading_code import loading_code
from espalier.hf.gguf.architecture import EVEN, UNEVEN
from espalier.models.adapter_config import WEIGHTS, num_labels_of, read_adapter_config
from espalier.results.finished_run import ADAPTER_CONFIG, FinishedRun
from espalier.results.model_chain import moved_base

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
    what = "the model"
    folder = run.model
    client = ""
    if run.client_models:
        client, folder = next(iter(run.client_models.items()))
        what = f"the model of {client}; each client has its own in clients/"
    if folder is not None:
        config = _config(folder / CONFIG)
        decoder = not _classifies(config.get("architectures"))
        yield _model(folder, what, decoder=decoder, own_code="auto_map" in config)
    elif run.adapter is not None and (run.adapter / WEIGHTS).is_file():
        settings = read_adapter_config(run.adapter / ADAPTER_CONFIG)
        decoder = settings.get("task_type") != "SEQ_CLS"
        base = str(settings.get("base_model_name_or_path"))
        # A base on the hub is a plain model; a local one may be pruned.
        file = Path(base) / CONFIG
        moved = None
        if Path(base).is_absolute() and not file.is_file():
            moved = moved_base(run)
            if moved is None:
                yield _without_base(run, base)
                return
            file = moved / CONFIG
        config = _config(file) if file.is_file() else {}
        own_code = "auto_map" in config
        yield _adapter(run.adapter, base, moved, decoder=decoder, own_code=own_code)
    else:
        return
    if decoder:
        of_client = f" --client {shlex.quote(client)}" if client else ""
        yield from _commands(run, of_client)
        yield _serving(run, of_client, config)


class _Config(Form):
    model_type: str = "llama"
    architectures: list[str] | None = None


def _config(path: Path) -> dict[str, Any]:
    config = read_json_object(path)
    require_form(_Config, config, str(path), "restore the file from a backup")
    return config


def _classifies(architectures: object) -> bool:
    names = architectures if isinstance(architectures, list) else []
    return any(str(name).endswith("ForSequenceClassification") for name in names)


def _model(folder: Path, what: str, *, decoder: bool, own_code: bool) -> Snippet:
    """Return the lines for a model; one with layers of its own shapes brings its code."""
    note = (
        "Its layers have other shapes than transformers' own, so its directory has the code that"
        " builds them."
        if own_code
        else ""
    )
    place = str(folder)
    lines = loading_code(
        place, decoder=decoder, as_adapter=False, own_code=own_code, tokenizer=place
    )
    return Snippet(f"Load {what}", f"{lines}\n{_use(decoder)}", note)


def _adapter(
    folder: Path, base: str, moved: Path | None, *, decoder: bool, own_code: bool
) -> Snippet:
    """Return the lines for an adapter; its base may be a pruned model that brings its code.

    ``moved`` is where the base model is, if that is not where the adapter names it.
    """
    lines = loading_code(
        str(folder),
        decoder=decoder,
        as_adapter=True,
        own_code=own_code,
        tokenizer=str(moved or base),
        num_labels=0 if decoder else num_labels_of(folder),
        base=str(moved or ""),
    )
    note = "" if moved is None else "Both runs were moved, so the adapter names another place."
    return Snippet("Load the adapter on its base model", f"{lines}\n{_use(decoder)}", note)


def _without_base(run: FinishedRun, base: str) -> Snippet:
    """Return what to do with an adapter whose base model is gone."""
    return Snippet(
        "Use the adapter",
        f"espalier export {shlex.quote(str(run.path))} --to transformers --out merged --base MODEL",
        f"The base model is no longer in {base}, and the adapter does not load without it. Put it"
        " back, or name a copy of it as MODEL: its hash is compared with the one of this run.",
    )


def _commands(run: FinishedRun, of_client: str) -> Iterator[Snippet]:
    """Yield the commands that talk to a language model and evaluate it."""
    path = shlex.quote(str(run.path))
    yield Snippet(
        "Talk to it",
        f"espalier chat {path}{of_client} --compare",
        "The base model answers next to it.",
    )
    yield Snippet(
        "Evaluate it on a public benchmark",
        f"espalier eval {path} --tasks arc_easy,hellaswag --with-base",
        "This needs lm-evaluation-harness (extra lm-eval), which downloads the tasks.",
    )


def _serving(run: FinishedRun, of_client: str, config: Mapping[str, Any]) -> Snippet:
    """Return the commands that serve a result, or its base model ``config`` with the adapter."""
    export = f"espalier export {shlex.quote(str(run.path))}{of_client} --to"
    own_code = "auto_map" in config
    lines = []
    notes = []
    if not own_code:
        lines.append(f"{export} transformers --out served\ntransformers serve served")
        notes.append("transformers serve is an HTTP server (extra serving of transformers).")
    if config.get("model_type", "llama") in (UNEVEN if own_code else EVEN):
        lines.append(f"{export} gguf --out served-gguf")
        notes.append("The GGUF file is for llama.cpp and Ollama (extra gguf).")
    if not lines:
        notes.append("Neither transformers serve nor llama.cpp knows its layers.")
    notes.append("docs/how-to/serve.md says what works for each method.")
    return Snippet("Serve it", "\n\n".join(lines), " ".join(notes))


def _use(decoder: bool) -> str:
    """Return the lines that use ``model`` and ``tokenizer``."""
    tokens = f'tokens = tokenizer("{QUESTION}", return_tensors="pt")\n'
    if not decoder:
        return f"{tokens}print(model(**tokens).logits.argmax(-1))"
    return (
        f"{tokens}answer = model.generate(**tokens, max_new_tokens=50)\n"
        "print(tokenizer.decode(answer[0]))"
    )
