"""What a method's processes hold and compute, beside what all have in common: the client's messages, and the server's steps."""

from abc import ABC, abstractmethod
from functools import cached_property

from espalier.modeling.opened import OpenedModel
from espalier.settings.run import RunSettings
from espalier.settings.task import TEXT
from espalier.wire.evaluation import Texts
from server_app.planning.memory import Memory, Moment, all_beside
from server_app.planning.sizes import Sizes
from server_app.planning.streamed import FLOAT32, evaluation

OWN_WINDOWS = 48
"""Held-out windows of a client's own text, of which nobody knows the number beforehand."""
EXPORT_WINDOWS = 4
"""Of public text, on which what was exported is compared."""


class Work(ABC):
    """What a run's processes do, for a client that stays warm: it keeps what it may keep between messages.

    Parameters
    ----------
    texts : what clients are asked to evaluate
    message : bytes of the largest message
    """

    def __init__(
        self, settings: RunSettings, model: OpenedModel, texts: Texts, message: int
    ) -> None:
        self.settings = settings
        self.model = model
        self.texts = texts
        self.message = message
        self.sizes = Sizes(settings, model)

    @property
    def windows(self) -> tuple[int, int]:
        """Calibration windows of a client, and their tokens."""
        return self.settings.data.windows, self.settings.data.window_tokens

    @cached_property
    def evaluated(self) -> list[Moment]:
        """Moments of evaluating one model on the public texts; on own text no more windows are taken to be there."""
        return evaluation(
            self.sizes,
            max([sum(self.texts.num_windows), OWN_WINDOWS * self.texts.own_text]),
            self.texts.window_tokens,
        )

    @abstractmethod
    def client(self) -> Memory:
        """Of a client."""

    @abstractmethod
    def server(self, simulation: bool) -> Memory:
        """Of the ServerApp's process."""

    @abstractmethod
    def operations(self) -> float:
        """Additions and multiplications of a client's work in one round."""

    def forward(self, tokens: int, numbers: int | None = None) -> float:
        """Additions and multiplications of passing so many tokens through the model, or through so many numbers of it."""
        return (
            2.0
            * tokens
            * (self.sizes.parameters - self.sizes.embeddings if numbers is None else numbers)
        )

    def result_parameters(self) -> int:
        """Parameters of the model that the run leads to, or each client."""
        return self.sizes.parameters

    # ----- what all servers do --------------------------------------------------------------------------------------------

    def measured(self) -> list[Moment]:
        """Moments of evaluating at the server, on all public texts."""
        chosen = self.settings.evaluation
        texts = len(chosen.named_texts()) if self.settings.task.name == TEXT else 0
        number = max(sum(self.texts.num_windows), texts * (chosen.max_windows or OWN_WINDOWS))
        return evaluation(self.sizes, number, chosen.window_tokens, "evaluating,")

    def exported(self) -> list[Moment]:
        """Moments of checking an export: the model as transformers loads it, beside the blocks of the one that is meant."""
        if self.settings.export_check == "streamed":
            return self.reread(
                EXPORT_WINDOWS, self.settings.evaluation.window_tokens, "checking the export,"
            )
        return [self.reloaded(self.result_parameters())]

    def reread(self, windows: int, tokens: int, name: str) -> list[Moment]:
        """Moments of comparing what transformers reads module by module with the meant model, which is read block by block.

        A result is no larger than its base but for what a merge or a rotation needs, so the base's sizes stand for both.
        """
        sizes = self.sizes
        edited = 2 * FLOAT32 * sizes.largest_matrix
        logits = {"logits": sizes.logits(windows, tokens)}
        both = {
            "both heads": sizes.head * sizes.computed + sizes.loaded(sizes.head, sizes.head),
            "logits, twice": 2 * logits["logits"],
        }
        meant = all_beside(
            evaluation(sizes, windows, tokens, name, edited),
            {"logits of the file": logits["logits"]},
        )
        return [
            *meant,
            Moment(
                f"{name} both logits",
                {**both, "hidden states": 2 * sizes.hidden_states(windows, tokens)},
            ),
        ]

    def reloaded(self, parameters: int) -> Moment:
        """A whole model of transformers that computes a few logits; its files are mapped while it is loaded."""
        tokens = EXPORT_WINDOWS * self.settings.evaluation.window_tokens
        mapped = parameters * self.sizes.stored if self.sizes.is_converted else 0
        logits = 2 * min(1 << 24, tokens * self.sizes.vocabulary) * self.sizes.computed
        return Moment(
            "checking the export",
            {"the whole model": parameters * self.sizes.computed + mapped, "logits": logits},
        )

    def received(self) -> Moment:
        """A part of a reply: as it came, and as it is unpacked."""
        return Moment("receiving", {"a message, twice": 2 * self.message})
