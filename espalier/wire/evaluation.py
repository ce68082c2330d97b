"""Contract of ``evaluate``: public token windows down, mean losses up.

Covers: no text, window or item is scored beyond what the run's settings name; a real site also refuses texts of few predictions
and few items (``require_many``), whose means say how it would go on with single sentences.
Does not cover: what the texts say. A server may write a sentence over and over, or another in each window; of one text it
learns one number.
"""

from typing import Annotated

from pydantic import Field

from espalier.settings.mistakes import Mistake
from espalier.settings.run import RunSettings
from espalier.settings.task import TEXT
from espalier.wire.contract import Contract, Side
from espalier.wire.messages import MOST_SECONDS, Scalars
from espalier.wire.payload import TensorSpec
from espalier.wire.printable import printable

OWN_TEXT_MODELS = ("dense", "local_only", "federated")
"""The models that a client evaluates on its own held-out text, in order of ``Losses.own_losses``."""


class Texts(Scalars):
    """Which public texts the windows belong to, how many windows each has, and whether the client's own text counts too."""

    names: list[str]
    num_windows: list[Annotated[int, Field(ge=1)]]
    window_tokens: int = Field(ge=2)
    own_text: bool
    test_metrics: list[str] = Field(default_factory=list)
    """Scores that are asked for on public test items; none without such items."""
    test_items: int = Field(0, ge=0)
    test_requests: int = Field(0, ge=0)
    test_tokens: int = Field(0, ge=0)
    """How many items there are, and requests and tokens in them."""


class Losses(Scalars):
    """Mean next-token losses in nats."""

    losses: list[float]
    """Of the client's local result, per public text."""
    own_losses: list[float]
    """Of ``OWN_TEXT_MODELS`` on the client's own held-out text; empty if it was not asked for."""
    test_scores: list[float] = Field(default_factory=list)
    """Of the client's local result, per metric that was asked for."""
    seconds: float = Field(ge=0, le=MOST_SECONDS)


METRICS = frozenset({"acc", "acc_norm", "loss"})
"""Scores that a client gives on public test items."""

LEAST_PREDICTIONS = 1000
"""Over how many predictions a real site's loss on a public text must be a mean."""
LEAST_ITEMS = 100
"""Over how many public test items a real site's scores must be means."""

WINDOWS_BLOB = "public-windows"
TEST_BLOB = "public-test"


MOST_LOSS = 700.0
"""Nats of a client's mean loss; its perplexity is still a number."""

LOSS_DIGITS = 3
"""Decimals to which losses and scores are rounded: a perplexity of 40 is told to 0.02."""

OWN_LOSS_LIMIT = 20.0
"""Nats that one prediction, or one item of a class, counts at most in a loss on a client's own text, whatever the model: a
server that delivers one with huge numbers would read single items off the mean. One in 485 million has this loss."""


def require_of_run(texts: Texts, run: RunSettings) -> None:
    """Refuse to evaluate on more, or on other texts, than the settings name.

    Raises
    ------
    Mistake
        It names the key.
    """
    chosen = run.evaluation
    on_text = run.task.name == TEXT
    if texts.names and not (run.clients_evaluate and on_text):
        raise Mistake(
            "Texts: texts are not allowed with evaluation.local-only or evaluation.baselines ="
            " false, or a task"
        )
    if set(texts.names) - chosen.named_texts().keys():
        raise Mistake("Texts: evaluation.texts names no such text")
    if texts.names and texts.window_tokens != chosen.window_tokens:
        told = f"evaluation.window-tokens = {chosen.window_tokens}"
        raise Mistake(f"Texts: windows of {texts.window_tokens} tokens, {told}")
    if chosen.max_windows and (most := max(texts.num_windows, default=0)) > chosen.max_windows:
        raise Mistake(
            f"Texts: {most} windows of a text, evaluation.max-windows = {chosen.max_windows}"
        )
    most_items = (
        run.task.max_test_items or texts.test_items if run.clients_evaluate and not on_text else 0
    )
    if texts.test_items > most_items:
        raise Mistake(f"Texts: {texts.test_items} test items, {most_items} are allowed")
    if set(texts.test_metrics) - METRICS or len(set(texts.test_metrics)) < len(texts.test_metrics):
        raise Mistake(
            f"Texts: test_metrics are not some of {', '.join(sorted(METRICS))}, each once"
        )
    if bool(texts.test_metrics) != bool(texts.test_items):
        raise Mistake("Texts: test_metrics without test_items, or the other way round")


def require_many(texts: Texts) -> None:
    """Refuse public texts of few predictions, and few items: a mean over them says how a model goes on with a sentence.

    Raises
    ------
    Mistake
        It names the text, the numbers and the remedy.
    """
    for name, number in zip(texts.names, texts.num_windows, strict=True):
        if (predictions := number * (texts.window_tokens - 1)) < LEAST_PREDICTIONS:
            raise Mistake(
                f"evaluation.texts: '{printable(name)}' gives {predictions} predictions, sites"
                f" evaluate what they make alone on {LEAST_PREDICTIONS} or more; take a longer"
                " text, raise evaluation.max-windows or evaluation.window-tokens, or set"
                " evaluation.local-only to false"
            )
    if 0 < texts.test_items < LEAST_ITEMS:
        raise Mistake(
            f"task.test-path: there are {texts.test_items} test items, sites score what they make"
            f" alone on {LEAST_ITEMS} or more; give more items, raise task.max-test-items, or set"
            " evaluation.local-only to false"
        )


def test_specs(texts: Texts) -> dict[str, TensorSpec]:
    """The tensors of public test items, flat."""
    per_request = ("lengths", "answer-tokens", "characters")
    sizes = {
        "tokens": texts.test_tokens,
        "num-options": texts.test_items,
        "answers": texts.test_items,
    }
    sizes |= dict.fromkeys(per_request, texts.test_requests)
    return {name: TensorSpec("I32", (size,)) for name, size in sizes.items()}


def _is_score(metric: str, value: float) -> bool:
    """Whether a metric can have a value: a loss is not negative, all others are shares of the items."""
    return value >= 0 and (metric == "loss" or value <= 1)


def contract(method: str, texts: Texts, own_text: bool) -> Contract:
    """The contract of an evaluation by a client; ``own_text`` is what the run's settings say."""
    if texts.own_text != own_text:
        raise Mistake("Texts: own_text is not what evaluation.own-text says")
    if not len(set(texts.names)) == len(texts.names) == len(texts.num_windows):
        raise Mistake(
            f"Texts: {len(set(texts.names))} different names, {len(texts.num_windows)} numbers of"
            " windows"
        )
    windows = {
        name: TensorSpec("I32", (count, texts.window_tokens))
        for name, count in zip(texts.names, texts.num_windows, strict=True)
    }
    blobs = {WINDOWS_BLOB: windows} if windows else {}
    if texts.test_items:
        blobs[TEST_BLOB] = test_specs(texts)
    own = len(OWN_TEXT_MODELS) if texts.own_text else 0

    def a_loss_per_text(report: Scalars) -> None:
        if isinstance(report, Losses) and (len(report.losses), len(report.own_losses)) != (
            len(texts.names),
            own,
        ):
            found = (
                f"{len(report.losses)} losses for {len(texts.names)} texts,"
                f" {len(report.own_losses)} own for {own}"
            )
            raise Mistake(f"Losses: {found}")
        for name in ("losses", "own_losses", "test_scores") if isinstance(report, Losses) else ():
            if any(value != round(value, LOSS_DIGITS) for value in getattr(report, name)):
                raise Mistake(f"Losses: {name} have more than {LOSS_DIGITS} decimals")
        if isinstance(report, Losses) and any(
            not 0 <= loss <= OWN_LOSS_LIMIT for loss in report.own_losses
        ):
            raise Mistake(f"Losses: own_losses are not between 0 and {OWN_LOSS_LIMIT}")
        if isinstance(report, Losses) and len(report.test_scores) != len(texts.test_metrics):
            raise Mistake(
                f"Losses: {len(report.test_scores)} scores for {len(texts.test_metrics)} metrics"
            )
        if isinstance(report, Losses) and any(not 0 <= loss <= MOST_LOSS for loss in report.losses):
            raise Mistake(f"Losses: losses are not between 0 and {MOST_LOSS}")
        if isinstance(report, Losses) and not all(
            map(_is_score, texts.test_metrics, report.test_scores)
        ):
            raise Mistake(
                "Losses: test_scores are not between 0 and 1, or a loss among them is below 0"
            )

    return Contract(
        kind="evaluate",
        method=method,
        down=Side(Texts, blobs),
        up=Side(Losses, check_scalars=a_loss_per_text),
        observer=(
            "how well the client's own local result predicts public text, one number per text, and"
            " does on public test items, one number per metric, rounded to three decimals and told"
            " once in a run (a server that makes up the texts learns which of them the result"
            " predicts better; `least-tokens` says on how much data that rests at least); with"
            " `evaluation.own-text`, where the site allows it, how well the dense, its own and the"
            " federated model predict its own held-out text or items: one number each, a mean over"
            " at least 1000 predicted tokens of text, 1000 classified items, or 1000 tokens of at"
            " least 100 answers, in which no prediction counts over 20 nats, rounded to three"
            " decimals (a server that chooses the model learns counts of tokens or classes, and one"
            " that takes the difference of two such means, one of which has an item more, learns"
            " that item's; so a site allows this only to a server that it trusts with them); and"
            " how long it took"
        ),
    )
