"""Lines of Python and shell that load, serve and evaluate what a run wrote."""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from espalier.environment.bounded_json import read_json_object
from espalier.environment.hub_models import is_on_hub
from espalier.environment.paths import DEMO, at_home
from espalier.results.finished_run import ADAPTER_CONFIG, MODEL, FinishedRun

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


def base_model(run: FinishedRun) -> str:
    """Return the base model as transformers loads it: a directory, or its name on the hub."""
    name = str(run.setting("model"))
    if name == DEMO:
        from espalier_assets import DEMO_MODEL

        return str(DEMO_MODEL)
    if is_on_hub(name):
        return name
    folder = at_home(name).absolute()
    # A run that wrote a model can be the base of another run.
    of_a_run = (folder / "run.json").exists() and not (folder / CONFIG).exists()
    return str(folder / MODEL if of_a_run else folder)


def _snippets(run: FinishedRun) -> Iterator[Snippet]:
    if run.client_models:
        name, folder = next(iter(run.client_models.items()))
        yield from _of_model(folder, f"the model of {name}; each client has its own in clients/")
    elif run.model is not None:
        yield from _of_model(run.model, "the model")
    if run.adapter is not None and not run.client_models:
        yield from _of_adapter(run.adapter, base_model(run))


def _of_model(folder: Path, what: str) -> Iterator[Snippet]:
    """Yield the lines for a model; one with layers of its own shapes brings its code."""
    config = read_json_object(folder / CONFIG)
    remote = "auto_map" in config
    loader = CLASSIFIER if _classifies(config.get("architectures")) else DECODER
    trust = ", trust_remote_code=True" if remote else ""
    note = (
        "Its layers have other shapes than transformers' own, so its directory has the code that"
        " builds them."
        if remote
        else ""
    )
    yield Snippet(
        f"Load {what}",
        f"from transformers import AutoTokenizer, {loader}\n\n"
        f"path = {_text(folder)}\n"
        "tokenizer = AutoTokenizer.from_pretrained(path)\n"
        f"model = {loader}.from_pretrained(path{trust})\n{_use(loader)}",
        note,
    )
    if loader == CLASSIFIER:
        return
    yield _service(folder, remote)
    pretrained = f"pretrained={folder}" + (",trust_remote_code=True" if remote else "")
    yield _evaluation(pretrained)


def _service(folder: Path, remote: bool) -> Snippet:
    """Return the lines that serve a model over HTTP.

    ``transformers serve`` 5.24 looks for the class of a model in transformers itself, also with
    ``--trust-remote-code``.
    """
    if remote:
        return Snippet(
            "Serve it",
            "",
            "The command transformers serve knows only classes of transformers, so it cannot serve"
            " this model. A method with the setting form writes a model that it serves with"
            " form=plain, if all blocks keep the same shape, or with form=zero-filled, as large as"
            " the base.",
        )
    return Snippet(
        "Serve it",
        f"pip install 'transformers[serving]'\ntransformers serve {shlex.quote(str(folder))}",
        "An HTTP server with the interface of OpenAI.",
    )


def _of_adapter(folder: Path, base: str) -> Iterator[Snippet]:
    """Yield the lines for an adapter; its base may be a pruned model that brings its code."""
    config = read_json_object(folder / ADAPTER_CONFIG)
    loader = CLASSIFIER if config.get("task_type") == "SEQ_CLS" else DECODER
    remote = (file := Path(base) / CONFIG).is_file() and "auto_map" in read_json_object(file)
    options = ", trust_remote_code=True" if remote else ""
    if loader == CLASSIFIER:
        options += ", num_labels=..."
    name, at, revision = base.partition("@")
    if at and not Path(base).is_dir():
        base = name
        options += f", revision={_text(revision)}"
    yield Snippet(
        "Load the adapter on its base model",
        "from peft import PeftModel\n"
        f"from transformers import AutoTokenizer, {loader}\n\n"
        f"base = {_text(base)}\n"
        "tokenizer = AutoTokenizer.from_pretrained(base)\n"
        f"model = {loader}.from_pretrained(base{options})\n"
        f"model = PeftModel.from_pretrained(model, {_text(folder)})\n{_use(loader)}",
        "num_labels is the number of classes of the task." if loader == CLASSIFIER else "",
    )
    if loader == CLASSIFIER:
        return
    yield Snippet(
        "Write base and adapter as one model",
        'model.merge_and_unload().save_pretrained("merged")\ntokenizer.save_pretrained("merged")',
        "The new directory loads like other models"
        + ("." if remote else ", and transformers serve serves it."),
    )
    code = ",trust_remote_code=True" if remote else ""
    yield _evaluation(f"pretrained={base},peft={folder}{code}")


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


def _evaluation(arguments: str) -> Snippet:
    return Snippet(
        "Evaluate it on a public benchmark",
        "pip install lm-eval\n"
        f"lm_eval --model hf --model_args {shlex.quote(arguments)} --tasks arc_easy",
        "The tasks are downloaded from the Hugging Face hub.",
    )


def _text(value: Path | str) -> str:
    return repr(str(value))
