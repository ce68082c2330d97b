"""Measure the dense, the federated and, in simulation, the centralized model on public texts and on the task's items."""

import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

from espalier.corpora.tasks.catalogue import task_named
from espalier.corpora.tasks.task import Generation
from espalier.evaluation.chance import chance_of_options, majority_share, uniform_loss
from espalier.evaluation.exact_match import exact_match, generate, shortened
from espalier.evaluation.perplexity import mean_losses, perplexity
from espalier.evaluation.scores import score
from espalier.modeling.adapters import factors_of, merged
from espalier.modeling.block_stream import BlockStream
from espalier.modeling.computing import Computing
from espalier.modeling.edits import Edits, dense
from espalier.modeling.opened import OpenedModel
from espalier.settings.mistakes import Mistake
from espalier.settings.run import RunSettings
from espalier.storage.blobs import BlobStore
from espalier.training.adapted import AdaptedModel
from espalier.wire.adapters import Tensors
from espalier.wire.payload import block_key
from pruning_kernels.factors import Factors
from server_app.figures import figure
from server_app.public_tests import PublicTests
from server_app.results import Summary
from strategies.baselines.centralized import centralized
from strategies.baselines.centralized_tuning import tuned
from strategies.engine.run import Run
from strategies.results.adapters import AdapterResult
from strategies.results.kept import KeptResult
from strategies.results.votes import VoteResult

T = TypeVar("T")


def measure_pruned(
    run: Run, computing: Computing, result: KeptResult | VoteResult, tests: PublicTests, summary: Summary
) -> None:
    """Losses on the texts."""
    stream = BlockStream(run.model, computing)
    edits: dict[str, Edits] = {"dense": dense, "federated": result.edits}
    scratch = run.folder.path / "centralized"
    if (pooled := _pooled(run, lambda: centralized(run, stream, BlobStore(scratch)))) is not None:
        edits["centralized"] = pooled
    _measure_texts(run, stream, edits, tests, summary)
    shutil.rmtree(scratch, ignore_errors=True)


def measure_tuned(run: Run, computing: Computing, result: AdapterResult, tests: PublicTests, summary: Summary) -> None:
    """Losses on the texts, and scores on the task's items."""
    columns: dict[str, Tensors] = {"dense": {}, "federated": {key: result.tensors(key) for key in result.blobs}}
    if (pooled := _pooled(run, lambda: tuned(run, computing))) is not None:
        columns["centralized"] = pooled
    if tests.texts:
        edits = {column: _merging(result, tensors) for column, tensors in columns.items()}
        _measure_texts(run, BlockStream(run.model, computing), edits, tests, summary)
    if tests.encoded is not None:
        _measure_items(run, computing, result, columns, tests, summary)


def _pooled(run: Run, make: Callable[[], T]) -> T | None:
    """The pooled-data baseline; None where it is not wanted, or a client's data cannot be read, which is no reason to fail."""
    if not run.simulation or run.settings.evaluation.centralized == "off":
        return None
    try:
        return make()
    except Mistake as mistake:
        run.progress.note("no_baseline", f"no centralized baseline: {mistake}", reason=str(mistake))
        return None


def _merging(result: AdapterResult, tensors: Tensors) -> Edits:
    def factors(index: int) -> dict[str, Factors]:
        key = block_key(index)  # blocks without an adapter are not among them
        return factors_of(result.adapters, index, tensors[key]) if key in tensors else {}

    return merged(factors)


def _measure_texts(run: Run, stream: BlockStream, edits: Mapping[str, Edits], tests: PublicTests, summary: Summary) -> None:
    run.progress.begin("evaluating", len(edits))
    for column, made in edits.items():
        losses = mean_losses(stream, tests.texts, made)
        for name, loss in losses.items():
            summary.losses[name][column] = loss
        text = ", ".join(f"{name} {figure(perplexity(loss))}" for name, loss in losses.items())
        run.progress.step("evaluated", f"{column}: {text}", column=column, losses=losses)


def _measure_items(
    run: Run,
    computing: Computing,
    result: AdapterResult,
    columns: Mapping[str, Tensors],
    tests: PublicTests,
    summary: Summary,
) -> None:
    """Score all columns with one model in memory, the base as it was trained on."""
    assert tests.encoded is not None
    settings = run.settings
    prompts, how = [item.prompt for item in tests.items], _writing(settings, tests)
    limit, tokenizer = run.model.num_positions or sys.maxsize, run.model.tokenizer
    summary.tests = {"number": len(tests.encoded), "cut": num_cut(settings, run.model, tests)}
    adapted = AdaptedModel.load(run.model, computing, settings, result.adapters)
    base, size = adapted.values(), settings.training.batch_size
    run.progress.begin("testing", len(columns))
    for column, tensors in columns.items():
        adapted.set(tensors or base)
        scores = score(adapted.whole, tests.encoded, tests.num_classes > 0, size, computing.device)
        scores = {metric: scores[metric] for metric in tests.metrics}
        if how is not None:
            written = generate(adapted.whole, tokenizer, prompts, how, limit, size, computing.device)
            scores |= exact_match(written, tests.items, how)
        for metric, value in scores.items():
            summary.scores.setdefault(metric, {})[column] = value
        text = ", ".join(f"{metric} {figure(value, 3)}" for metric, value in scores.items())
        run.progress.step("tested", f"{column}: {text}", column=column, scores=scores)
    summary.chances = {metric: _chance(run, tests, metric) for metric in summary.scores}


def _writing(settings: RunSettings, tests: PublicTests) -> Generation | None:
    """How a model writes its answers to the items; None where it writes none."""
    how = task_named(settings.task.name).generation
    return replace(how, max_new_tokens=settings.task.answer_tokens) if how and not tests.num_classes else None


def num_cut(settings: RunSettings, model: OpenedModel, tests: PublicTests) -> int:
    """Items that lose tokens because they are too long: with their answer, or as the prompt of one that is to be written."""
    assert tests.encoded is not None
    lost = set(tests.encoded.cut)
    if (how := _writing(settings, tests)) is not None:
        lost |= shortened(model.tokenizer, [item.prompt for item in tests.items], how, model.num_positions or sys.maxsize)
    return len(lost)


def _chance(run: Run, tests: PublicTests, metric: str) -> float:
    """What a model reaches on the items that has learnt nothing."""
    if metric == "loss":
        return uniform_loss(tests.num_classes or len(run.model.tokenizer))
    if not metric.startswith("acc"):
        return 0.0
    task = task_named(run.settings.task.name)
    return majority_share(tests.items) if task.classes else chance_of_options(tests.items)
