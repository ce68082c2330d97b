"""Memory, disk space and operations of a run: the base class for all methods."""

from abc import ABC, abstractmethod
from collections import Counter

from espalier.models.plan import ModelPlan
from espalier.settings.pruning import PersonalModelSettings
from espalier.settings.registry import METHODS
from espalier.storage.client_state import ROUNDS_KEPT
from server_app.artifacts.outcome import A_FEW
from server_app.estimate.messages.traffic import USUAL_SAMPLES, RunTraffic
from server_app.estimate.work.memory import Memory, Moment, Process, superlink_disk
from server_app.estimate.work.sizes import FLOAT32, Sizes

GRADIENT_AND_MOMENTS = 3
"""Number of values for each trained parameter, in addition to the parameter."""
LEDGER_LINE = 260
"""Bytes per line of ``ledger.jsonl``, with one line per message and one per blob in it."""
SMALL_FILES = 60_000
"""Bytes of the summary, settings, checkpoint documents, and model card."""
OWN_MODEL = "its own model"
"""Name of the model in ``models-dir``; all other files are in ``state-dir``."""


def smaller(plan: ModelPlan, ratio: float) -> int:
    """Return the parameters of a model without a fraction of the weights of its blocks."""
    return plan.num_parameters - round(ratio * plan.num_weights)


class Work(ABC):
    """Memory, disk space and operations of a run's processes.

    Clients are warm nodes, which keep everything between messages that they may keep. Moments with
    less memory than others are left out, for example most aggregations: a server that checks and
    evaluates a model needs more.
    """

    processes: tuple[Process, Process] = ("client", "server")
    """Types of the processes of client and server, which determine their libraries."""

    def __init__(self, traffic: RunTraffic) -> None:
        self.traffic = traffic
        self.settings = traffic.settings
        self.model = traffic.model
        self.plan = traffic.model.plan
        self.strategy = traffic.strategy
        self.sizes = Sizes(self.settings, self.model)
        self.num_samples = self.settings.data.num_samples
        self.tokens = self.settings.data.sequence_length

    # ----- parts of a method ----------------------------------------------------------------------

    @abstractmethod
    def worked(self, clients: int = 1) -> list[Moment]:
        """Return the moments of the work on the text of some clients."""

    @abstractmethod
    def operations(self) -> float:
        """Return the additions and multiplications of a client's work in one round."""

    def aggregated(self) -> list[Moment]:
        """Return the moments of the aggregation of replies."""
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

    # ----- memory ---------------------------------------------------------------------------------

    def client(self) -> Memory:
        """Return the memory of a client."""
        return Memory(self.processes[0], (*self.worked(), *self.evaluated()))

    def server(self, simulation: bool) -> Memory:
        """Return the memory of the ServerApp's process."""
        moments = [*self.aggregated(), *self.checked(), *self.measured()]
        baseline = METHODS[self.settings.method].baseline
        # The server itself computes the centralized baseline, with the samples of all clients.
        if baseline and self.settings.makes_centralized(simulation=simulation):
            moments += self.worked(self.settings.num_clients)
        return Memory(self.processes[1], tuple(moments))

    def evaluated(self) -> list[Moment]:
        """Return the moments of the evaluation of one model at a client."""
        tokens = self.settings.evaluation.sequence_length
        return self.sizes.evaluation(self.num_evaluated(), tokens)

    def num_evaluated(self) -> int:
        """Return the number of sequences a client evaluates; that of its own text is assumed."""
        texts = self.traffic.tests.of_clients(self.settings).values()
        return max(sum(map(len, texts)), USUAL_SAMPLES * self.settings.evaluation.own_text)

    def measured(self) -> list[Moment]:
        """Return the moments of the server's evaluation on all evaluation texts."""
        num_samples = sum(map(len, self.traffic.tests.texts.values()))
        return self.sizes.evaluation(num_samples, self.settings.evaluation.sequence_length)

    def checked(self) -> list[Moment]:
        """Return the moments of the check of an export."""
        tokens = self.settings.evaluation.sequence_length
        return self.reread(A_FEW, tokens, "checking the export,")

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
        file_logits = {"logits of the file": logits}
        return [
            *(moment.plus(file_logits) for moment in expected),
            Moment(f"{name} both logits", both),
        ]

    def forward(self, tokens: int, numbers: int | None = None) -> float:
        """Return the additions and multiplications of a forward pass.

        ``numbers`` is the number of parameters that the tokens pass, by default those of the model
        without embeddings.
        """
        passed = self.sizes.parameters - self.sizes.embeddings if numbers is None else numbers
        return 2.0 * tokens * passed

    # ----- disk space at its fullest, in bytes by kind of content ---------------------------------

    def client_disk(self, simulation: bool) -> dict[str, int]:
        """Return a client's disk space; its quantized base is kept for later runs."""
        rounds = Counter[int]()
        for exchange in self.traffic.exchanges()[0]:
            if exchange.kind in ("train", "fetch", "masked", "push"):
                rounds[exchange.server_round] += exchange.num_bytes
        # A client stores its answers to the last rounds; the rounds with most bytes are the limit.
        answers = sum(size for _, size in rounds.most_common(ROUNDS_KEPT))
        files = {"answers and pushed data": answers, **self.client_files()}
        if self.keeps_models and not simulation:
            files[OWN_MODEL] = self._model_bytes
        return files

    def server_disk(self, simulation: bool) -> dict[str, int]:
        """Return the disk space of the run directory."""
        settings = self.settings
        exchanges = self.traffic.exchanges().values()
        replies = [
            [
                exchange
                for exchange in client_exchanges
                if exchange.kind in ("train", "fetch", "masked")
            ]
            for client_exchanges in exchanges
        ]
        by_round = Counter[int]()
        for reply in (reply for client_replies in replies for reply in client_replies):
            by_round[reply.server_round] += reply.up
        # A result is about as large as what one client sends in all rounds.
        results = max(sum(reply.up for reply in client_replies) for client_replies in replies)
        # The first adapters are stored too, and the last ones are written for peft.
        if settings.tunes:
            results += 2 * results // max(1, len(by_round))
        files = {
            "replies of a round": max(by_round.values(), default=0),
            "checkpoint": results,
            "ledger": 3 * LEDGER_LINE * sum(map(len, exchanges)),
            "small files": SMALL_FILES,
        }
        if not settings.tunes or settings.lora.merge:
            files["model/"] = self._model_bytes
        files |= self.server_files()
        if self.keeps_models and simulation:
            files["clients/"] = self._model_bytes * settings.num_clients
        return files

    def superlink_disk(self) -> int:
        """Return the disk space of the SuperLink."""
        return superlink_disk(self.traffic.total().largest, self.settings.num_clients)

    @property
    def _model_bytes(self) -> int:
        return self.result_parameters() * self.sizes.stored

    @property
    def keeps_models(self) -> bool:
        """True if each client writes a model of its own."""
        job = self.settings.job
        return isinstance(job, PersonalModelSettings) and job.keep_models
