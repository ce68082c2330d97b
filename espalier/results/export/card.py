"""Model card of an export: front matter that the hub reads, results, chain and settings.

The body is that of the card which the run wrote. Local paths are in neither.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from espalier.data.tasks.catalogue import TASKS
from espalier.environment.paths import is_dataset_name
from espalier.hf.export.loading_code import how_to_load
from espalier.hf.families import has_own_code
from espalier.hf.opening.model_files import public_name
from espalier.models.adapter_config import num_labels_of
from espalier.results.base_chain import in_words, printable
from espalier.results.figures import (
    DENSE,
    FEDERATED,
    Quality,
    evaluated,
    evaluated_of_client,
)
from espalier.results.sources import RESULT, Source
from espalier.results.use.scores import data_in_words, whole_scores

FRONT = re.compile(r"\A---\n.*?\n---\n", re.DOTALL)
CODE = re.compile(r"```python\n.*?```\n", re.DOTALL)
ON_HUB = re.compile(r"[\w.-]+/[\w.-]+")
TITLES = {DENSE: "base model", FEDERATED: "this result"}


def card_of(source: Source, as_adapter: bool, license_name: str = "", repository: str = "") -> str:
    """Return the content of ``README.md``.

    Parameters
    ----------
    source : the result
    as_adapter : the adapter is exported, not the merged model
    license_name : licence of the base model, such as ``apache-2.0``; empty if it is not known
    repository : name on the hub, for the lines that load it
    """
    lines = ["---", _front_matter(source, as_adapter, license_name), "---", ""]
    body = _body(source)
    if source.adapter is not None and not as_adapter:
        # As in the card of a run that merges its adapters.
        body = body.replace(", tuned: adapters\n", ", tuned\n", 1)
    if _qualities(source):
        # The results follow below.
        body = body.replace("The run's `summary.json` compares it with the base model.\n", "", 1)
    own_code = has_own_code(source.model.config)
    place = repository or "this directory"
    is_head = as_adapter and source.model.family.kind != "decoder"
    num_labels = num_labels_of(source.folder) if is_head else 0
    load = how_to_load(
        source.model, place, as_adapter=as_adapter, own_code=own_code, num_labels=num_labels
    )
    load += "\n"
    # The run's card loads "this directory"; the export may have another name and form.
    body = CODE.sub(lambda _: load, body, count=1) if CODE.search(body) else f"{body}\n{load}"
    lines += [body.strip(), "", *_results(source)]
    return "\n".join(lines).rstrip() + "\n"


def base_on_hub(source: Source) -> str:
    """Return the nearest base model that the hub has, ``owner/name``; empty if none is known."""
    for link in source.chain:
        if link.revision and ON_HUB.fullmatch(link.model):
            return link.model
    return ""


def _front_matter(source: Source, as_adapter: bool, license_name: str) -> str:
    from huggingface_hub import EvalResult, ModelCardData

    decoder = source.model.family.kind == "decoder"
    method = "" if source.run is None else str(source.run.summary.get("method"))
    base = base_on_hub(source)
    results = [
        EvalResult(
            task_type="text-generation" if decoder else "text-classification",
            dataset_type=quality.dataset,
            dataset_name=quality.dataset,
            metric_type=quality.metric,
            metric_value=quality.values[FEDERATED],
        )
        for quality in _qualities(source)
    ]
    results += [
        EvalResult(
            task_type="text-generation",
            dataset_type=score["task"],
            dataset_name=score["task"],
            dataset_args={"num_few_shot": score["num_fewshot"]},
            metric_type=score["metric"],
            metric_value=score["value"],
        )
        for score in _scores(source)
        # Others could not repeat a score on items of a local file.
        if score.get("data_sha256") is None
    ]
    data = ModelCardData(
        base_model=base or None,
        base_model_relation=("adapter" if as_adapter else "finetune") if base else None,
        datasets=datasets_of(source) or None,
        library_name="peft" if as_adapter else "transformers",
        license=license_name or None,
        pipeline_tag="text-generation" if decoder else "text-classification",
        tags=[
            "espalier",
            "federated-learning",
            *(["lora"] if source.adapter is not None else []),
            *filter(None, [method]),
        ],
        model_name=source.title if results else None,
        eval_results=results or None,
    )
    return str(data.to_yaml()).rstrip()


def _qualities(source: Source) -> list[Quality]:
    """Return the measures of the result, or of a client's own model."""
    if source.run is None:
        return []
    if source.name == RESULT:
        return evaluated(source.run)
    return evaluated_of_client(source.run, source.name)


def _scores(source: Source) -> list[Mapping[str, Any]]:
    return [] if source.run is None else whole_scores(source.run, source.name)


def datasets_of(source: Source) -> list[str]:
    """Return the run's dataset of the hub, named or that of its task; empty if there is none."""
    if source.run is None or source.run.setting("data.source") != "hub":
        return []
    path = str(source.run.setting("data.path") or "")
    task = str(source.run.setting("task.name"))
    if not path and task in TASKS:
        path = TASKS[task].hub.name
    return [path] if is_dataset_name(path) else []


def _body(source: Source) -> str:
    written = source.folder / "README.md"
    if written.is_file():
        body = FRONT.sub("", written.read_text(encoding="utf-8"))
    else:
        name = public_name(source.folder, source.model.config)
        body = f"# {printable(name)}\n"
    chain = "" if source.run is None else in_words(source.chain)
    if chain and "| made from |" not in body:
        body += f"\n\nMade from {chain}.\n"
    return body


def _results(source: Source) -> Iterator[str]:
    measures = _qualities(source)
    if not measures and not _scores(source):
        return
    yield from ("## Results", "")
    if measures:
        yield from (f"| | {' | '.join(TITLES.values())} |", "|---|---|---|")
    for one in measures:
        values = (one.values.get(column) for column in TITLES)
        cells = ("" if value is None else f"{value:.4g}" for value in values)
        better = "lower" if one.lower_is_better else "higher"
        yield f"| {one.metric} on {one.dataset} ({better} is better) | {' | '.join(cells)} |"
    yield ""
    for score in _scores(source):
        error = "" if score.get("stderr") is None else f" ± {score['stderr']:.4f}"
        yield (
            f"- {score['task']}{data_in_words(score.get('data_sha256'))}, {score['metric']}:"
            f" {score['value']:.4f}{error}"
            f" ({score['items']} items, {score['num_fewshot']} examples, lm-evaluation-harness)"
        )
    yield ""
