"""Base class for memory and operations of a method, with the parts that all methods share.

These are the client's messages and the steps of the server.
"""

from abc import ABC, abstractmethod
from functools import cached_property

from espalier.hf.opening.opened import OpenedModel
from espalier.messages.evaluation import Texts
from espalier.settings.run import RunSettings
from espalier.settings.task import TEXT
from server_app.estimate.block_stream import FLOAT32, evaluation
from server_app.estimate.memory import Memory, Moment, all_beside
from server_app.estimate.sizes import Sizes

OWN_WINDOWS = 48
"""Assumed number of sequences of a client's own held-out text, which is unknown in advance."""
EXPORT_WINDOWS = 4
"""Number of sequences of evaluation text for the check of an export."""


class Work(ABC):
    """Memory and operations of a run's processes.

    Clients are warm nodes, which keep everything between messages that they may keep.

    Parameters
    ----------
    texts : request of the evaluation at clients
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
        """Number of calibration samples of a client, and tokens per sample."""
        return self.settings.data.windows, self.settings.data.window_tokens

    @cached_property
    def evaluated(self) -> list[Moment]:
        """Moments of the evaluation of one model on the evaluation texts.

        A client's own text is assumed to have at most ``OWN_WINDOWS`` sequences.
        """
        return evaluation(
            self.sizes,
            max([sum(self.texts.num_windows), OWN_WINDOWS * self.texts.own_text]),
            self.texts.window_tokens,
        )

    @abstractmethod
    def client(self) -> Memory:
        """Return the memory of a client."""

    @abstractmethod
    def server(self, simulation: bool) -> Memory:
        """Return the memory of the ServerApp's process."""

    @abstractmethod
    def operations(self) -> float:
        """Return the additions and multiplications of a client's work in one round."""

    def forward(self, tokens: int, numbers: int | None = None) -> float:
        """Return the additions and multiplications of a forward pass.

        Parameters
        ----------
        tokens : number of tokens
        numbers : number of parameters that they pass, by default those of the model without
            embeddings
        """
        return (
            2.0
            * tokens
            * (self.sizes.parameters - self.sizes.embeddings if numbers is None else numbers)
        )

    def result_parameters(self) -> int:
        """Return the number of parameters of the resulting model, or of each client's."""
        return self.sizes.parameters

    # ----- steps of all servers -----

    def measured(self) -> list[Moment]:
        """Return the moments of the server's evaluation on all evaluation texts."""
        chosen = self.settings.evaluation
        texts = len(chosen.named_texts()) if self.settings.task.name == TEXT else 0
        number = max(sum(self.texts.num_windows), texts * (chosen.max_windows or OWN_WINDOWS))
        return evaluation(self.sizes, number, chosen.window_tokens, "evaluating,")

    def exported(self) -> list[Moment]:
        """Return the moments of the check of an export.

        The model loaded by transformers is compared with the expected model, which is read block by
        block.
        """
        return self.reread(
            EXPORT_WINDOWS, self.settings.evaluation.window_tokens, "checking the export,"
        )

    def reread(self, windows: int, tokens: int, name: str) -> list[Moment]:
        """Return the moments of the comparison of two models that are both read piece by piece.

        transformers reads one module by module, the expected model is read block by block. A result
        is not larger than its base, except for temporary tensors of a merge or a rotation. The
        base's sizes are therefore used for both.
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
        """Return the moment at which transformers has loaded a whole model and computes logits.

        Its files are memory-mapped while it is loaded.
        """
        tokens = EXPORT_WINDOWS * self.settings.evaluation.window_tokens
        mapped = parameters * self.sizes.stored if self.sizes.is_converted else 0
        logits = 2 * min(1 << 24, tokens * self.sizes.vocabulary) * self.sizes.computed
        return Moment(
            "checking the export",
            {"the whole model": parameters * self.sizes.computed + mapped, "logits": logits},
        )

    def received(self) -> Moment:
        """Return the moment at which a part of a reply exists twice: as received, and unpacked."""
        return Moment("receiving", {"a message, twice": 2 * self.message})
