"""Base class for memory and operations of a method, with the parts that all methods share."""

from abc import ABC, abstractmethod

from espalier.settings.methods import METHODS
from espalier.settings.task import TEXT
from server_app.estimate.memory import Memory, Moment, Process, all_beside
from server_app.estimate.sizes import FLOAT32, Sizes
from server_app.estimate.traffic import RunTraffic

OWN_SAMPLES = 48
"""Assumed number of sequences of a client's own held-out text, which is unknown in advance."""
EXPORT_SAMPLES = 4
"""Number of sequences of evaluation text for the check of an export."""
KEPT_ROUNDS = 2
"""Number of rounds whose replies and state a client keeps."""


class Work(ABC):
    """Memory and operations of a run's processes.

    Clients are warm nodes, which keep everything between messages that they may keep.

    Parameters
    ----------
    traffic : messages of the run
    """

    processes: tuple[Process, Process] = ("client", "server")
    """Types of the processes of client and server, which determine their libraries."""

    def __init__(self, traffic: RunTraffic) -> None:
        self.traffic = traffic
        self.settings = traffic.settings
        self.model = traffic.model
        self.plan = traffic.model.plan
        self.texts = traffic.texts
        self.strategy = traffic.strategy
        self.message = traffic.total("most").largest
        self.sizes = Sizes(self.settings, self.model)
        self.num_samples = (self.settings.data.num_samples, self.settings.data.sequence_length)

    # ----- parts of a method ----------------------------------------------------------------------

    @abstractmethod
    def worked(self, clients: int = 1, name: str = "calibrating,") -> list[Moment]:
        """Return the moments of the work on the text of some clients."""

    @abstractmethod
    def operations(self) -> float:
        """Return the additions and multiplications of a client's work in one round."""

    def pooled(self) -> list[Moment]:
        """Return the moments of the centralized baseline, by default a client's with all text."""
        return self.worked(self.settings.num_clients, "pooled data,")

    def aggregated(self) -> list[Moment]:
        """Return the moments of the aggregation of replies."""
        return []

    def finished(self) -> list[Moment]:
        """Return the moments of a client's steps after evaluation."""
        return []

    def result_parameters(self) -> int:
        """Return the number of parameters of the resulting model, or of each client's."""
        return self.sizes.parameters

    def client_files(self) -> dict[str, int]:
        """Return the bytes of a client's files by kind, without messages and its own model."""
        return {}

    def server_files(self) -> dict[str, int]:
        """Return the bytes of further files of the run directory, by kind."""
        return {}

    # ----- processes ------------------------------------------------------------------------------

    def client(self) -> Memory:
        """Return the memory of a client."""
        moments = (*self.worked(), *self.evaluated(), self.received(), *self.finished())
        return Memory(self.processes[0], moments)

    def server(self, simulation: bool) -> Memory:
        """Return the memory of the ServerApp's process."""
        moments = [*self.aggregated(), *self.checked(), *self.measured(), self.received()]
        baseline = METHODS[self.settings.method].baseline
        if baseline and self.settings.makes_centralized(simulation=simulation):
            moments += self.pooled()
        return Memory(self.processes[1], tuple(moments))

    def forward(self, tokens: int, numbers: int | None = None) -> float:
        """Return the additions and multiplications of a forward pass.

        ``numbers`` is the number of parameters that the tokens pass, by default those of the model
        without embeddings.
        """
        passed = self.sizes.parameters - self.sizes.embeddings if numbers is None else numbers
        return 2.0 * tokens * passed

    def evaluated(self) -> list[Moment]:
        """Return the moments of the evaluation of one model at a client.

        A client's own text is assumed to have at most ``OWN_SAMPLES`` sequences.
        """
        num_samples = max(sum(self.texts.num_samples), OWN_SAMPLES * self.texts.own_text)
        return self.sizes.evaluation(num_samples, self.texts.sequence_length)

    def measured(self) -> list[Moment]:
        """Return the moments of the server's evaluation on all evaluation texts."""
        chosen = self.settings.evaluation
        texts = len(chosen.named_texts()) if self.settings.task.name == TEXT else 0
        number = max(sum(self.texts.num_samples), texts * (chosen.max_samples or OWN_SAMPLES))
        return self.sizes.evaluation(number, chosen.sequence_length)

    def checked(self) -> list[Moment]:
        """Return the moments of the check of an export.

        The model loaded by transformers is compared with the expected model, which is read block by
        block.
        """
        tokens = self.settings.evaluation.sequence_length
        return self.reread(EXPORT_SAMPLES, tokens, "checking the export,")

    def reread(self, num_samples: int, tokens: int, name: str) -> list[Moment]:
        """Return the moments of the comparison of two models that are both read piece by piece.

        transformers reads one module by module, the expected model is read block by block. A result
        is not larger than its base, except for temporary tensors of a merge or a rotation. The
        base's sizes are therefore used for both.
        """
        sizes = self.sizes
        logits = sizes.logits(num_samples, tokens)
        expected = sizes.evaluation(num_samples, tokens, name, 2 * FLOAT32 * sizes.largest_matrix)
        both = {
            "both heads": sizes.head * sizes.computed + sizes.loaded(sizes.head, sizes.head),
            "logits, twice": 2 * logits,
            "hidden states": 2 * sizes.hidden_states(num_samples, tokens),
        }
        return [
            *all_beside(expected, {"logits of the file": logits}),
            Moment(f"{name} both logits", both),
        ]

    def received(self) -> Moment:
        """Return the moment at which a part of a reply exists twice: as received, and unpacked."""
        return Moment("receiving", {"a message, twice": 2 * self.message})
