"""Model card (``README.md``) of a model or adapter that a run wrote.

The card lists the base model, the method and the versions of the libraries. The same settings and
versions give the same bytes.

Covers: the run's settings without paths, the base model's name and hash, the versions of the
libraries.

Does not cover: anything about a site. A site's data and its location are not published.
"""

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import tomli_w

from espalier.amounts import count
from espalier.environment.paths import is_dataset_name
from espalier.hf.export.loading_code import how_to_load
from espalier.hf.families import has_own_code
from espalier.hf.opening.model_files import commit_of
from espalier.hf.opening.opened_model import OpenedModel
from espalier.privacy.guarantee import guarantee_of
from espalier.privacy.guarantee import in_words as guarantee_in_words
from espalier.results.base_chain import chain_of, in_words, model_name, printable
from espalier.settings.keys import flatten, unread
from espalier.settings.registry import METHODS, tables_of
from espalier.settings.run import RunSettings
from espalier.settings.tables.task import TEXT
from server_app.report.summary import versions

SOURCES = {
    "documentation": "the documentation of Python, a different part for each client",
    "code": "source code of Python's standard library, a different part for each client",
    "files": "the run's own files",
    "hub": "a dataset of the Hugging Face hub",
}
PATHS = ("path", "test-path")
"""Settings that are left out of the card, because paths reveal details of a machine."""


def pruned_card(settings: RunSettings, model: OpenedModel, sparsity: float) -> str:
    """Return the card of a pruned model; ``sparsity`` is the fraction of zero weights."""
    rows = {
        "sparsity": (
            f"{sparsity:.2%} of the weights of the decoder blocks' linear layers; all other"
            " tensors are unchanged"
        )
    }
    return _card(settings, model, "pruned", rows, "transformers", ("pruning",))


def smaller_card(settings: RunSettings, model: OpenedModel, report: Mapping[str, Any]) -> str:
    """Return the card of a smaller model; ``report`` is that of ``CutResult`` with the form."""
    rows = {
        "size": (
            f"{report['parameters']:,} parameters, {report['remaining_fraction']:.2%} of the base"
            " model's"
        )
    }
    if report["form"] == "compact":
        rows["to load it"] = "`AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True)`"
    what = "pruned: a smaller model"
    own_code = report["form"] == "compact"
    return _card(settings, model, what, rows, "transformers", ("pruning",), own_code=own_code)


def edited_card(settings: RunSettings, model: OpenedModel) -> str:
    """Return the card of a model whose weights were changed by a method that does not prune."""
    return _card(settings, model, "changed", {}, "transformers", ())


def merged_card(settings: RunSettings, model: OpenedModel, report: Mapping[str, Any]) -> str:
    """Return the card of a model with merged adapters."""
    return _card(settings, model, "tuned", _adapter_rows(report), "transformers", ("lora",))


def adapter_card(settings: RunSettings, model: OpenedModel, report: Mapping[str, Any]) -> str:
    """Return the card of the adapters; ``report`` is that of ``AdapterResult``."""
    return _card(settings, model, "tuned: adapters", _adapter_rows(report), "peft", ("lora",))


def _adapter_rows(report: Mapping[str, Any]) -> dict[str, str]:
    ranks = ", ".join(map(str, report["ranks"]))
    return {
        "adapters": f"LoRA of rank {ranks}; {report['trained_parameters']:,} trained parameters"
    }


def _card(
    settings: RunSettings,
    model: OpenedModel,
    what: str,
    rows: Mapping[str, str],
    library: str,
    tags: tuple[str, ...],
    *,
    own_code: bool = False,
) -> str:
    # A base that is a pruned model itself needs code too.
    own_code |= has_own_code(model.config)
    base = printable(model_name(model))
    commit = commit_of(model.directory)
    at = f" at commit `{commit}`" if commit else ""
    used = {**versions(), **({"peft": version("peft")} if library == "peft" else {})}
    table = {
        "base model": f"`{base}`{at}; SHA-256 of its weights and tokenizer: `{model.sha256}`",
        **({"made from": made_from} if (made_from := in_words(chain_of(model))) else {}),
        "method": METHODS[settings.method].title,
        **rows,
        "clients": (
            f"{settings.num_clients} requested; the run's `summary.json` lists those that took part"
        ),
        "data": _data(settings),
        **_privacy(settings),
        "versions": ", ".join(f"{name} {number}" for name, number in used.items()),
    }
    lines = [
        *_front_matter(
            base, model, library, ("espalier", "federated-learning", *tags, settings.method)
        ),
        "",
        f"# {base}, {what}",
        "",
        f"Made with Espalier {used['espalier']} by federated learning.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in table.items()),
        "",
        how_to_load(
            model,
            "this directory",
            as_adapter=library == "peft",
            own_code=own_code,
            num_labels=settings.num_classes if model.family.kind != "decoder" else 0,
        ),
        "",
        "The licence and the limitations of the base model also apply to this one.",
        "The run's `summary.json` compares it with the base model.",
        "",
        "## Settings",
        "",
        "```toml",
        tomli_w.dumps(_settings(settings)).rstrip(),
        "```",
    ]
    return "\n".join(lines) + "\n"


def _front_matter(base: str, model: OpenedModel, library: str, tags: tuple[str, ...]) -> list[str]:
    """Return the front matter for the Hugging Face Hub.

    It contains the base model only if its name has an owner, because the Hub would take other names
    for a different model.
    """
    task = "text-generation" if model.family.kind == "decoder" else "text-classification"
    return [
        "---",
        *([f"base_model: {base}"] if "/" in base else []),
        f"library_name: {library}",
        f"pipeline_tag: {task}",
        "tags:",
        *(f"- {tag}" for tag in tags),
        "---",
    ]


def _privacy(settings: RunSettings) -> dict[str, str]:
    """Return the row on differential privacy; none if the run has none."""
    guarantee = guarantee_of(settings)
    return (
        {}
        if guarantee is None
        else {"differential privacy": guarantee_in_words(guarantee.to_json())}
    )


def _data(settings: RunSettings) -> str:
    data = settings.data
    tuned = settings.tunes
    source = SOURCES[data.origin]
    if data.origin == "hub" and is_dataset_name(data.path):
        source = f"the dataset `{data.path}` of the Hugging Face hub"
    if tuned and settings.task.name != TEXT:
        amount = f"items of the task `{settings.task.name}`"
    else:
        # Private sums are those of all records.
        of_all = settings.privacy.on and not tuned
        number = "samples" if tuned else count(data.num_samples, "sample")
        amount = (
            f"{'all records, each' if of_all else number} of"
            f"{' at most' if of_all else ''} {data.sequence_length} tokens"
        )
    return (
        f'{amount} for each client, from {source} (`data.source = "{data.origin}"`), or from the'
        " site's own file"
    )


def _settings(settings: RunSettings) -> dict[str, Any]:
    """Return the method's tables and other settings that affect the result, without paths."""
    nested = settings.nested()
    chosen = {key: nested[key] for key in ("method", "seed", "num-clients", "threads", "dtype")}
    private = ("privacy",) if settings.privacy.on else ()
    not_read = {*PATHS, *unread(flatten(nested))}
    # Tables that the method reads; others do not affect the result.
    for name in ("data", *private, *tables_of(settings.method)):
        chosen[name] = {
            key: value
            for key, value in nested[name].items()
            if key not in PATHS and f"{name}.{key}" not in not_read
        }
    return chosen
