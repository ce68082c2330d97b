"""What every method's own table answers, so that nothing else has to ask which method a run has."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar

from espalier.settings.table import Table

if TYPE_CHECKING:
    from espalier.settings.federation import FederationSettings
    from espalier.settings.lora import LoraSettings
    from espalier.settings.run import RunSettings


class MethodSettings(Table):
    """A method's own table."""

    FEDERATION: ClassVar[tuple[str, ...]] = ()
    """Keys of ``[federation]`` that the method reads."""
    ROUNDS: ClassVar[int] = 1
    """What ``federation.rounds = 0`` stands for; where the method does not read it, how many rounds a run has."""
    WEIGHTS: ClassVar[tuple[str, ...]] = ("equal",)
    """What ``federation.client-weights`` may be; ``paper`` stands for the first."""
    FIRST_DELIVERY: ClassVar[int] = 1
    """The first round in which something may be delivered to a client."""
    ROUNDS_THAT_DIFFER: ClassVar[tuple[int, ...]] = (1,)
    """The first round of each form that orders and replies have."""
    CHECKS_SITE: ClassVar[bool] = False
    """Whether the job's module has ``require_ready``, which asks at enrolment whether what a site's owner chose can be done."""
    MAKES_ALONE_WITH: ClassVar[Mapping[str, str | int | tuple[str, ...]]] = {}
    """Values of keys of this table with which ``makes_alone`` holds, where it does not by default; of several each does."""
    NEEDS_BASE_MODEL: ClassVar[bool] = True
    """Whether a site takes part only with the server's base model."""

    def fits_alone(self, federation: "FederationSettings") -> bool:
        """Whether clients that were in no round may be asked to fit what they have of their own."""
        return False

    @property
    def makes_alone(self) -> bool:
        """Whether the rounds leave no local-only result, so that clients make it in a message of its own."""
        return False

    @property
    def brings_nf4(self) -> str:
        """The key and value by which clients are brought a model in NF4; empty where they are not."""
        return ""

    def num_rounds(self, federation: "FederationSettings") -> int:
        """Rounds of the run, as far as the settings say; methods that go by blocks have as many as the model."""
        return federation.rounds if "rounds" in self.FEDERATION else self.ROUNDS

    def asked_of_sites(self, run: "RunSettings") -> Mapping[str, tuple[str, int]]:
        """What training asks of a site in a round: by the site's limit, the keys that say it, and how much; none if none is."""
        return {}

    def last_rounds(
        self, federation: "FederationSettings", num_blocks: Callable[[], int], num_clients: int
    ) -> range:
        """The rounds after which a run may end; ``federation`` is that of the run, ``num_blocks`` gives that of its model."""
        return range(self.num_rounds(federation), self.num_rounds(federation) + 1)

    def contradictions(
        self, method: str, federation: "FederationSettings", lora: "LoraSettings", num_clients: int
    ) -> list[str]:
        """What does not fit each other in this table, or this table and what it shares with others, a line each."""
        return []
