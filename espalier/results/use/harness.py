"""Scores of a run's models on tasks of lm-evaluation-harness (``espalier eval``).

The harness is the optional library lm-eval. It downloads the data of its tasks from the Hugging
Face hub, unless the data are in the hub's cache or the user names local files. The scores are
stored in the run directory.
"""

import difflib
import hashlib
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from espalier.environment.hub_access import use_cache_if_unreachable
from espalier.environment.paths import at_home
from espalier.errors import InputError, as_command, first_line
from espalier.results.finished_run import FinishedRun, open_run
from espalier.results.report.page import FILE as REPORT
from espalier.results.report.page import write_report
from espalier.results.sources import Source, require_result, require_text_model, sources_of
from espalier.results.use.harness_records import with_local_data
from espalier.results.use.loading import device_named, load_model, load_source_tokenizer
from espalier.results.use.scores import Score, show_table, store

Json = dict[str, Any]
MISSING = (
    "lm-evaluation-harness is not installed here; install the extra"
    " (pip install -c constraints.txt -e '.[lm-eval]')"
)


@dataclass(frozen=True)
class Question:
    """Tasks, and how the harness asks them.

    Parameters
    ----------
    tasks : names of the harness, also of groups such as ``mmlu``
    include : directories with task definitions (YAML) of the user
    data : local files with the records of tasks, by task
    limit : maximum number of items per task; None takes all
    num_fewshot : number of examples before each item; None takes the task's own
    batch_size : number of sequences in a forward pass
    """

    tasks: Sequence[str]
    include: Sequence[str]
    data: Mapping[str, str]
    limit: int | None
    num_fewshot: int | None
    batch_size: int


def require_harness() -> None:
    """Raise InputError if lm-evaluation-harness is not installed."""
    if find_spec("lm_eval") is None:
        raise InputError(MISSING)


def load_tasks(question: Question, folder: Path) -> tuple[Any, list[str | Json]]:
    """Load all tasks with their data, before any model is loaded.

    Raises InputError if the harness does not know a task, or the data of a task cannot be read.

    Returns
    -------
    Task manager of the harness, and what it loads the tasks from: names and definitions.

    Parameters
    ----------
    folder : folder for converted records
    """
    for path in question.include:
        if not at_home(path).is_dir():
            raise InputError(f"--include-path {path}: is not a directory; name one with task files")
    manager = import_module("lm_eval.tasks").TaskManager(
        include_path=[str(at_home(path)) for path in question.include]
    )
    task_names = manager.all_tasks
    for name in [*question.tasks, *question.data]:
        if name not in task_names:
            close = difflib.get_close_matches(name, task_names, n=3)
            meant = f"did you mean {', '.join(close)}? " if close else ""
            raise InputError(
                f"task {name!r}: lm-evaluation-harness {version('lm-eval')} does not have it;"
                f" {meant}`lm-eval ls tasks` lists all, --include-path adds your own"
            )
    if unused := question.data.keys() - set(question.tasks):
        raise InputError(f"--data {min(unused)}=...: the task is not in --tasks; add it there")
    loadable = []
    for name in question.tasks:
        loadable.append(_loadable(manager, name, question.data.get(name), folder))
    return manager, loadable


def _loadable(manager: Any, name: str, file: str | None, folder: Path) -> str | Json:
    """Return the name or definition of a task or group, after it was loaded once."""
    spec: str | Json = name
    if file is not None:
        entry = manager.task_index[name]
        if entry.yaml_path is None or entry.kind.name != "TASK":
            raise InputError(f"--data {name}={file}: is a group; name a single task of the group")
        yaml = import_module("lm_eval.tasks._yaml_loader")
        definition = yaml.load_yaml(entry.yaml_path, resolve_func=True)
        spec = with_local_data(definition, name, at_home(file), folder)
    try:
        manager.load([spec])
    # The harness and the library for datasets raise errors of many types.
    except Exception as error:
        if file is not None:
            raise InputError(
                f"--data {name}={file}: the task cannot be made of its records"
                f" ({type(error).__name__}: {first_line(error)}); name a file with the fields of"
                " the task's dataset"
            ) from None
        raise InputError(
            f"task {name!r}: its data cannot be loaded ({type(error).__name__}:"
            f" {first_line(error)}). Without the Hugging Face hub, name a file of its records:"
            f" --data {name}=FILE.jsonl"
        ) from None
    return spec


def scores_of(
    source: Source, manager: Any, tasks: Sequence[str | Json], question: Question, device: str
) -> list[Score]:
    """Load a model and return its scores, one per task, metric and filter.

    ``manager`` and ``tasks`` are those of ``load_tasks``.
    """
    harness = import_module("lm_eval")
    # It asks git for the commit of the current directory, and outside a checkout git complains.
    evaluator: Any = import_module("lm_eval.evaluator")
    evaluator.get_git_commit_hash = lambda: None
    models = import_module("lm_eval.models.huggingface")
    model = load_model(source, device)
    length = getattr(model.config, "max_position_embeddings", None)
    wrapped = models.HFLM(
        pretrained=model,
        tokenizer=load_source_tokenizer(source),
        max_length=length,
        batch_size=question.batch_size,
        device=str(device_named(device)),
    )
    done = harness.simple_evaluate(
        model=wrapped,
        tasks=list(tasks),
        task_manager=manager,
        num_fewshot=question.num_fewshot,
        limit=question.limit,
        log_samples=False,
    )
    hashes = {name: _sha256(at_home(file)) for name, file in question.data.items()}
    return [
        replace(score, data_sha256=hashes.get(task))
        for task in done["results"]
        for score in _scores_of_task(source.name, task, done)
    ]


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _scores_of_task(model: str, task: str, done: Mapping[str, Any]) -> Iterator[Score]:
    """Yield the scores of one task, or the means of a group, from the harness's results."""
    values = done["results"][task]
    items = done["n-samples"].get(task, {}).get("effective", 0)
    shots = done["n-shot"].get(task, 0)
    for key, value in values.items():
        metric, _, filtered = key.partition(",")
        if not filtered or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        error = values.get(f"{metric}_stderr,{filtered}")
        error = float(error) if isinstance(error, int | float) else None
        named = metric if filtered == "none" else f"{metric} ({filtered})"
        yield Score(model, task, named, float(value), error, int(items), int(shots))


def evaluate(
    run: FinishedRun, sources: Sequence[Source], question: Question, device: str
) -> list[Score]:
    """Return the scores of all models, and store them in the run directory.

    Raises InputError if a task is unknown, its data cannot be read, or a model cannot be loaded.
    """
    for source in sources:
        require_text_model(source)
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    found: list[Score] = []
    with tempfile.TemporaryDirectory(prefix="espalier-eval-") as folder:
        manager, tasks = load_tasks(question, Path(folder))
        for source in sources:
            print(f"evaluating {source.name} ({source.directory})", flush=True)
            scores = scores_of(source, manager, tasks, question, device)
            # Scores of one model are kept even if the next model fails.
            store(run, scores, version("lm-eval"), question.limit)
            found += scores
    return found


@as_command
def main(document: Mapping[str, Any]) -> None:
    """Evaluate the models of a run and print a table.

    Parameters
    ----------
    document : ``run``, ``clients``, ``with_base``, ``base``, ``device``, and ``Question``'s fields
    """
    # The harness sets its own levels and bars otherwise.
    os.environ.setdefault("LMEVAL_LOG_LEVEL", "ERROR")
    fields = Question.__dataclass_fields__
    run = open_run(document["run"])
    require_harness()
    require_result(run, document["clients"])
    if any(task not in document["data"] for task in document["tasks"]):
        use_cache_if_unreachable()
    sources = sources_of(
        run, document["clients"], with_base=document["with_base"], base=document["base"]
    )
    question = Question(**{name: document[name] for name in fields})
    show_table(evaluate(run, sources, question, document["device"]))
    write_report(run, run.path / REPORT)
    print(f"{run.path / REPORT}: written")
