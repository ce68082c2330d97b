"""Base class for the messages of a method: the steps of its strategy without any data.

The class of a method defines the requests that a client gets in each round. Their sizes follow from
the contracts. Quantities that depend on data or chance may differ between ``CASES``: the fewest
bytes, the usual number, the most bytes.
"""

from collections.abc import Iterator
from typing import Literal, get_args

from espalier.hf.opening.opened import OpenedModel
from espalier.messages.enrolment import Enrolment
from espalier.messages.evaluation import OWN_TEXT_MODELS, Texts
from espalier.messages.local_baseline import Alone
from espalier.messages.message import NoScalars
from espalier.models.plan import ModelPlan
from espalier.settings.run import RunSettings
from server_app.estimate.exchange import HASH, Correspondence, Exchange

Case = Literal["least", "usual", "most"]
CASES: tuple[Case, ...] = get_args(Case)


class Messages:
    """Messages of a run in which no client fails and no message is repeated.

    Parameters
    ----------
    texts : request of the evaluation at clients
    """

    def __init__(
        self, settings: RunSettings, model: OpenedModel, texts: Texts, case: Case = "usual"
    ) -> None:
        self.settings = settings
        self.model = model
        self.texts = texts
        self.case = case
        self.post = Correspondence(settings, self.plan_of_clients())

    @classmethod
    def differs(cls, settings: RunSettings) -> str:
        """Return what the size depends on apart from the settings, in words; may be empty."""
        return ""

    def plan_of_clients(self) -> ModelPlan:
        """Return the plan of the model that clients work on."""
        return self.model.plan

    @property
    def num_rounds(self) -> int:
        """Number of rounds of the run."""
        return self.settings.job.num_rounds(self.settings.federation)

    def round_of(self, client: int, server_round: int) -> list[Exchange]:
        """Return the messages of a client in a round; empty if the client is not asked.

        By default orders have no content.
        """
        return self.post.train(server_round, NoScalars())

    def result_of(self, client: int) -> list[Exchange]:
        """Return the messages that push the result to a client after the last round.

        By default the result has the parts of a reply.
        """
        if not self.settings.evaluation.own_text:
            return []
        last = self.num_rounds
        return [
            self.post.exchange("deliver", last, NoScalars(), part=part)
            for part in range(self.post.num_parts(last, NoScalars()))
        ]

    def alone_order(self, client: int) -> Alone | None:
        """Return the order for the local baseline after the last round; None if there is none."""
        return Alone() if self.asked and self.settings.job.makes_alone else None

    @property
    def asked(self) -> bool:
        """True if clients evaluate anything."""
        return bool(self.texts.names or self.texts.test_items or self.texts.own_text)

    def of_client(self, client: int) -> Iterator[Exchange]:
        """Yield all messages of a client in order, beginning with the first round."""
        for server_round in range(1, self.num_rounds + 1):
            yield from self.round_of(client, server_round)
        yield from self.result_of(client)
        if (order := self.alone_order(client)) is not None:
            yield self.post.exchange("alone", self.num_rounds, order)
        if self.asked:
            own = len(OWN_TEXT_MODELS) if self.texts.own_text else 0
            numbers = {
                "losses": len(self.texts.names),
                "test_scores": len(self.texts.test_metrics),
                "own_losses": own,
            }
            told = {name: [0.0] * number for name, number in numbers.items()}
            yield self.post.exchange("evaluate", self.num_rounds, self.texts, told=told)

    def enrolment(self) -> Exchange:
        """Return the enrolment messages of a node.

        The ledger assigns them to no client. The names have the lengths of those in a simulation.
        """
        told = Enrolment(
            site="node-00000", code_sha256=HASH, model_sha256=HASH, device="cpu", threads=1, capability=1.0, measured=False,
            approval=False,
            python="3.11.0", torch="2.0.0",
        ).model_dump()  # fmt: skip
        return self.post.exchange("enrol", 0, NoScalars(), told=told)
