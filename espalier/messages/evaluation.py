"""Contract of ``evaluate``: samples of the evaluation texts go down, mean losses come up.

Covers: no text, sample or item is scored beyond those of the run's settings. A real site also
refuses texts with few predictions and few test items (``require_many``), since a mean over few
shows how the model continues single sentences.
Does not cover: the content of the texts. A server may repeat one sentence, or put another one into
each sample; it learns one number per text.
"""

from typing import Annotated

from pydantic import Field

from espalier.errors import ProtocolError
from espalier.identity.names import printable
from espalier.messages.contract import Contract, Side
from espalier.messages.message import MAX_SECONDS, Fields
from espalier.messages.tensor_blobs import TensorSpec
from espalier.settings.run import RunSettings
from espalier.settings.tables.task import TEXT

OWN_TEXT_MODELS = ("dense", "local_baseline", "federated")
"""Models that a client evaluates on its held-out text, in the order of ``Losses.own_losses``."""


class Texts(Fields):
    """Fields of the request: evaluation texts, their samples, and public test items."""

    names: list[str]
    """Names of the evaluation texts."""
    num_samples: list[Annotated[int, Field(ge=1)]]
    """Number of samples of each text."""
    sequence_length: int = Field(ge=2)
    """Number of tokens in a sample."""
    own_text: bool
    """True if the client also evaluates on its own held-out text."""
    test_metrics: list[str] = Field(default_factory=list)
    """Scores on public test items; empty without such items."""
    test_items: int = Field(0, ge=0)
    """Number of test items."""
    test_requests: int = Field(0, ge=0)
    """Number of requests of all test items."""
    test_tokens: int = Field(0, ge=0)
    """Number of tokens of all requests."""

    @staticmethod
    def of_run(run: RunSettings, names: list[str], num_samples: int) -> "Texts":
        """Return the fields for texts with as many samples each and without test items."""
        return Texts(
            names=names,
            num_samples=[num_samples] * len(names),
            sequence_length=run.evaluation.sequence_length,
            own_text=run.evaluation.own_text,
        )


class Losses(Fields):
    """Fields of the reply: mean losses per token in nats, and scores."""

    losses: list[float]
    """Loss of the client's local result on each evaluation text."""
    own_losses: list[float]
    """Losses of ``OWN_TEXT_MODELS`` on the client's own held-out text; empty if not requested."""
    test_scores: list[float]
    """Scores of the client's local result, one per requested metric."""
    seconds: float = Field(ge=0, le=MAX_SECONDS)
    """Duration of the evaluation in seconds."""


METRICS = frozenset({"acc", "acc_norm", "loss"})
"""Scores that a client reports on public test items."""

MIN_PREDICTIONS = 1000
"""Minimum number of predictions over which a real site averages its loss on an evaluation text."""
MIN_ITEMS = 100
"""Minimum number of public test items over which a real site averages its scores."""

SAMPLES_BLOB = "public-samples"
TEST_BLOB = "public-test"


MAX_LOSS = 700.0
"""Maximum mean loss in nats; the perplexity of a larger one overflows."""

LOSS_DIGITS = 3
"""Decimals of losses and scores; this rounding changes a perplexity of 40 by at most 0.02."""

OWN_LOSS_LIMIT = 20.0
"""Maximum contribution of one prediction or item to a loss on the client's own text, in nats.

The limit holds for every model. Without it, a server could push a model with huge values and read
single items off the mean. A probability of 1 in 485 million has this loss.
"""

OBSERVER = (
    "How well the client's local baseline predicts the evaluation texts, one number per"
    " text, or the public test items, one number per metric, rounded to three decimals and"
    " answered once per run. A server that makes up the texts learns which of them it"
    " predicts better; `min-tokens` sets the minimum amount of data behind the model."
    " With `evaluation.own-text`, if the site allows it: how well the dense, the client's"
    " own and the federated model predict its own held-out text or items, one number each."
    " It is a mean over at least 1000 predicted tokens of text, 1000 classified items, or"
    " 1000 tokens of at least 100 answers, in which no prediction counts more than 20 nats,"
    " rounded to three decimals. A server that chooses the model learns counts of tokens or"
    " classes from it, and the loss of a single item from the difference of two such means."
    " So a site allows it only to a server that it trusts with these numbers. Also how long"
    " the evaluation took."
)
"""What an observer learns from a reply."""


def require_of_run(texts: Texts, run: RunSettings) -> None:
    """Check that the request names no more texts, samples and items than the settings allow.

    Raises
    ------
    ProtocolError
        If it does; the error names the setting.
    """
    settings = run.evaluation
    on_text = run.task.name == TEXT
    # Texts only for local baselines of runs without a task.
    if texts.names and not (run.evaluation.local_baseline and on_text):
        raise ProtocolError(
            "Texts: texts are not allowed with evaluation.local-baseline = false, or a task"
        )
    if set(texts.names) - settings.named_texts().keys():
        raise ProtocolError("Texts: evaluation.texts names no such text")
    if texts.names and texts.sequence_length != settings.sequence_length:
        setting = f"evaluation.sequence-length = {settings.sequence_length}"
        raise ProtocolError(f"Texts: samples of {texts.sequence_length} tokens, {setting}")
    if (
        settings.max_samples
        and (num_samples := max(texts.num_samples, default=0)) > settings.max_samples
    ):
        raise ProtocolError(
            f"Texts: {num_samples} samples of a text, evaluation.max-samples ="
            f" {settings.max_samples}"
        )
    # 0 as ``task.max-test-items`` means no limit.
    max_items = (
        run.task.max_test_items or texts.test_items
        if run.evaluation.local_baseline and not on_text
        else 0
    )
    if texts.test_items > max_items:
        raise ProtocolError(f"Texts: {texts.test_items} test items, {max_items} are allowed")
    # Each metric is one number about the client's model.
    if set(texts.test_metrics) - METRICS or len(set(texts.test_metrics)) < len(texts.test_metrics):
        raise ProtocolError(
            f"Texts: test_metrics are not some of {', '.join(sorted(METRICS))}, each once"
        )
    if bool(texts.test_metrics) != bool(texts.test_items):
        raise ProtocolError("Texts: test_metrics without test_items, or the other way round")


def require_many(texts: Texts) -> None:
    """Check that every mean is over enough predictions or items.

    A mean over few of them shows how a model continues single sentences.

    Raises
    ------
    ProtocolError
        If a text or the test items are too few; the error has the numbers and the remedy.
    """
    # Every token but the first of a sample is predicted.
    for name, num_samples in zip(texts.names, texts.num_samples, strict=True):
        if (predictions := num_samples * (texts.sequence_length - 1)) < MIN_PREDICTIONS:
            raise ProtocolError(
                f"evaluation.texts: '{printable(name)}' gives {predictions} predictions, sites"
                f" evaluate local baselines on {MIN_PREDICTIONS} or more; take a longer"
                " text, raise evaluation.max-samples or evaluation.sequence-length, or set"
                " evaluation.local-baseline to false"
            )
    if 0 < texts.test_items < MIN_ITEMS:
        raise ProtocolError(
            f"task.test-path: there are {texts.test_items} test items, sites score local baselines"
            f" on {MIN_ITEMS} or more; give more items, raise task.max-test-items, or set"
            " evaluation.local-baseline to false"
        )


def test_specs(texts: Texts) -> dict[str, TensorSpec]:
    """Return the specs of the flat tensors with the public test items."""
    per_request = ("lengths", "answer-tokens", "characters")
    sizes = {
        "tokens": texts.test_tokens,
        "num-options": texts.test_items,
        "answers": texts.test_items,
    }
    sizes |= dict.fromkeys(per_request, texts.test_requests)
    return {name: TensorSpec("I32", (size,)) for name, size in sizes.items()}


def contract(method: str, texts: Texts, own_text: bool) -> Contract:
    """Return the contract of an evaluation by a client.

    Raises ProtocolError if the fields contradict each other or ``own_text``.

    Parameters
    ----------
    own_text : setting ``evaluation.own-text`` of the run
    """
    # A server cannot ask for own text in a run that does not say so.
    if texts.own_text != own_text:
        raise ProtocolError("Texts: own_text is not what evaluation.own-text says")
    if not len(set(texts.names)) == len(texts.names) == len(texts.num_samples):
        raise ProtocolError(
            f"Texts: {len(set(texts.names))} different names, {len(texts.num_samples)} numbers of"
            " samples"
        )
    samples = {
        # Shapes follow from the fields, which were checked.
        name: TensorSpec("I32", (count, texts.sequence_length))
        for name, count in zip(texts.names, texts.num_samples, strict=True)
    }
    blobs = {SAMPLES_BLOB: samples} if samples else {}
    if texts.test_items:
        blobs[TEST_BLOB] = test_specs(texts)

    return Contract(
        kind="evaluate",
        method=method,
        down=Side(Texts, blobs),
        # The number of figures depends on the request.
        up=Side(Losses, check_fields=lambda report: _require_figures(report, texts)),
        observer=OBSERVER,
    )


def _require_figures(report: Losses, texts: Texts) -> None:
    """Check that a reply has one rounded number in its range per text, model and metric.

    Raises
    ------
    ProtocolError
        If it does not; the error names the field.
    """
    num_own = len(OWN_TEXT_MODELS) if texts.own_text else 0
    if (len(report.losses), len(report.own_losses)) != (len(texts.names), num_own):
        raise ProtocolError(
            f"Losses: {len(report.losses)} losses for {len(texts.names)} texts,"
            f" {len(report.own_losses)} own for {num_own}"
        )
    for name in ("losses", "own_losses", "test_scores"):
        # Further digits could carry other data.
        if any(value != round(value, LOSS_DIGITS) for value in getattr(report, name)):
            raise ProtocolError(f"Losses: {name} have more than {LOSS_DIGITS} decimals")
    if any(not 0 <= loss <= OWN_LOSS_LIMIT for loss in report.own_losses):
        raise ProtocolError(f"Losses: own_losses are not between 0 and {OWN_LOSS_LIMIT}")
    if len(report.test_scores) != len(texts.test_metrics):
        raise ProtocolError(
            f"Losses: {len(report.test_scores)} scores for {len(texts.test_metrics)} metrics"
        )
    if any(not 0 <= loss <= MAX_LOSS for loss in report.losses):
        raise ProtocolError(f"Losses: losses are not between 0 and {MAX_LOSS}")
    scores = zip(texts.test_metrics, report.test_scores, strict=True)
    # Accuracies are fractions; losses have no upper bound here.
    if any(score < 0 or (score > 1 and metric != "loss") for metric, score in scores):
        raise ProtocolError(
            "Losses: test_scores are not between 0 and 1, or a loss among them is below 0"
        )
