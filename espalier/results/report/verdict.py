"""Verdict on a run in a few sentences: what the result costs and what it gains."""

from collections.abc import Iterator, Sequence

from espalier.amounts import count, duration, size
from espalier.privacy.guarantee import in_words
from espalier.results.figures import DENSE, FEDERATED, PERPLEXITY, size_of
from espalier.results.finished_run import CLIENTS, FinishedRun
from espalier.results.report.comparison import Comparison, first_run
from espalier.results.run_status import run_status

TOLERANCE = 0.005
"""Relative difference up to which two sizes are called equal."""


def verdict(run: FinishedRun, comparisons: Sequence[Comparison]) -> list[str]:
    """Return the sentences of the verdict; the first one says how the run ended, if it failed."""
    status, _ = run_status(run.path)
    sentences = []
    if status == "failed":
        reason = str(run.summary.get("reason") or "without a reason").partition("\n")[0]
        sentences.append(f"The run failed: {reason}")
    elif status == "interrupted":
        sentences.append(f"The run was interrupted; continue it with resume-from={run.path}.")
    elif status == "running":
        sentences.append("The run is still at work; what follows is not its final result.")
    measured = [one for one in comparisons if one.change is not None]
    if measured:
        sentences += [_quality(measured), *_against_baselines(main_of(measured))]
    elif status == "completed":
        sentences.append("The result was not evaluated, so its quality is unknown.")
    return [*sentences, *_size(run), *_participants(run), *_privacy(run)]


def _privacy(run: FinishedRun) -> Iterator[str]:
    """Yield the guarantee of a differentially private run."""
    if guarantee := run.summary.get("privacy"):
        yield f"Differential privacy: {in_words(guarantee)}."


def main_of(comparisons: Sequence[Comparison]) -> Comparison:
    """Return the measure that the report names first."""
    return min(comparisons, key=lambda one: one.quality.rank)


def _quality(measured: Sequence[Comparison]) -> str:
    first = main_of(measured)
    before, after = (first.values[column].value for column in ("dense", "federated"))
    shown = [f"{value:,.{first.digits}f}" for value in (before, after)]
    differs = shown[0] != shown[1]
    words = {True: "better", False: "worse", None: "unchanged"}[
        first.is_better if differs else None
    ]
    sentence = (
        f"{first.title} is {shown[1]} with the federated result and {shown[0]} with the"
        f" {_model(first.names['dense'])}: {words}"
    )
    if differs:
        sentence += f" by {_difference(first, before, after)}"
    if of_clients := first.better_clients:
        sentence += " (better for {} of {} clients)".format(*of_clients)
    elif _overlap(first):
        sentence += ", but the intervals of both overlap"
    by_dataset = [main_of(group) for group in _by_dataset(measured)]
    if len(by_dataset) > 1:
        better = sum(one.is_better is True for one in by_dataset)
        sentence += f" (better on {better} of {len(by_dataset)} texts and tasks)"
    return f"{sentence}."


def _model(name: str) -> str:
    """Return ``dense model``, or ``base model (flap)`` if another run made the base."""
    kind, space, made = name.partition(" ")
    return f"{kind} model{space}{made}"


def _difference(comparison: Comparison, before: float, after: float) -> str:
    """Return a difference: in percent for a perplexity, otherwise as a number."""
    if comparison.is_relative and before:
        return f"{abs(after / before - 1):.1%}"
    return f"{abs(after - before):,.{comparison.digits}f}"


def _by_dataset(measured: Sequence[Comparison]) -> Iterator[list[Comparison]]:
    """Yield the measures of each text and task: several may be of one task."""
    found: dict[str, list[Comparison]] = {}
    for one in measured:
        found.setdefault(one.quality.dataset, []).append(one)
    yield from found.values()


def _overlap(comparison: Comparison) -> bool:
    """Return whether the intervals of the dense and the federated value have a common part."""
    intervals = [comparison.values[column].interval for column in ("dense", "federated")]
    known = [interval for interval in intervals if interval is not None]
    return len(known) == len(intervals) and max(low for low, _ in known) <= min(
        high for _, high in known
    )


def _against_baselines(main: Comparison) -> Iterator[str]:
    """Yield a sentence for each baseline that was computed."""
    federated = main.values["federated"].value
    if "original" in main.values:
        original = main.values["original"].value
        yield (
            f"The model with which the chain of runs began has {original:,.{main.digits}f}, the"
            f" result {federated / original:.3g} times that."
            if main.quality.metric == PERPLEXITY
            else f"The model with which the chain of runs began has {original:,.{main.digits}f}."
        )
    for column, what in (
        ("local_baseline", "clients get without the others"),
        ("centralized", "one party gets that has all clients' data"),
    ):
        if column not in main.values:
            continue
        value = main.values[column].value
        # As they are shown, so that no sentence calls a value better than itself.
        if f"{value:.{main.digits}f}" == f"{federated:.{main.digits}f}":
            words = "as good as"
        else:
            is_better = (federated < value) == main.quality.lower_is_better
            words = "better than" if is_better else "worse than"
        yield f"It is {words} what {what} ({value:,.{main.digits}f})."


def _size(run: FinishedRun) -> Iterator[str]:
    base = size_of(run, DENSE)
    result = size_of(run, FEDERATED)
    if base.parameters is None or result.parameters is None:
        return
    if result.is_adapter:
        yield (
            f"The adapter adds {result.parameters:,.0f} parameters ({size(result.num_bytes or 0)})"
            f" to the base model's {base.parameters:,.0f}."
        )
        return
    ratio = result.parameters / base.parameters
    of_clients = result.folder == CLIENTS
    what = "Each client's model has" if of_clients else "The model has"
    mean = " on average" if of_clients else ""
    sentence = f"{what} {result.parameters:,.0f} parameters{mean}"
    if ratio < 1 - TOLERANCE:
        sentence += f", {1 - ratio:.1%} fewer than its base"
    elif ratio > 1 + TOLERANCE:
        sentence += f", {ratio - 1:.1%} more than its base"
    else:
        sentence += ", as many as its base"
    if result.num_bytes is not None and base.num_bytes is not None:
        now = size(result.num_bytes)
        before = size(base.num_bytes)
        # Compared as they are shown, so that the sentence does not name one size twice.
        sentence += f", and takes {now} on disk"
        sentence += ", like it" if now == before else f" instead of {before}"
    yield f"{sentence}."
    first = first_run(run)
    if first is not None and (original := size_of(first, DENSE).parameters):
        yield (
            f"The model with which the chain of runs began has {original:,.0f} parameters; the"
            f" result has {result.parameters / original:.1%} of them."
        )
    sparsity = (run.summary.get("sparsity") or {}).get("achieved")
    if abs(ratio - 1) <= TOLERANCE and sparsity:
        yield (
            f"{sparsity:.1%} of the prunable weights are zero. Zeros make a model neither smaller"
            " nor faster."
        )


def _participants(run: FinishedRun) -> Iterator[str]:
    """Yield a sentence on clients, bytes and time."""
    finished = run.summary.get("finished")
    if finished is None:
        return
    asked = run.summary["num_clients"]
    sent = run.summary["bytes_up"] / max(1, asked)
    yield (
        f"{finished} of {count(asked, 'client')} took part to the end; a client sent {size(sent)}"
        f" on average, and the run took {duration(run.summary['seconds'])}."
    )
