"""Base class of the methods' own settings tables, and keys that two of them share.

Callers read these attributes instead of asking which method a run uses.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from espalier.settings.table import Table
from espalier.settings.tables.privacy import NO_MECHANISM

if TYPE_CHECKING:
    from espalier.settings.run import RunSettings
    from espalier.settings.tables.federation import FederationSettings
    from espalier.settings.tables.lora import LoraSettings


class MethodSettings(Table):
    """Settings table of one method."""

    FEDERATION: ClassVar[tuple[str, ...]] = ()
    """Keys of ``[federation]`` that the method reads."""
    ROUNDS: ClassVar[int] = 1
    """Number of rounds for ``federation.rounds = 0``.

    If the method does not read that key, this is the number of rounds of every run.
    """
    WEIGHTS: ClassVar[tuple[str, ...]] = ("equal",)
    """Allowed values of ``federation.client-weights``; ``auto`` stands for ``own_weights``."""
    RULES: ClassVar[tuple[str, ...]] = ("mean",)
    """Allowed values of ``federation.aggregation-rule``; ``auto`` stands for the first."""
    WHY_NO_OTHER_RULE: ClassVar[str] = ""
    """Reason why the method cannot have the other rules, for the error text."""
    FLEET: ClassVar[str] = "measured"
    """Meaning of ``federation.fleet = 'auto'`` in a simulation."""
    FIRST_PUSH: ClassVar[int] = 1
    """First round in which the server may push something to a client (``push``)."""
    ROUNDS_THAT_DIFFER: ClassVar[tuple[int, ...]] = (1,)
    """First round of each format of orders and replies."""
    CHECKS_SITE: ClassVar[bool] = False
    """True if the job's module has ``require_ready``.

    It checks at enrolment that the run can use what the site's owner chose.
    """
    MAKES_LOCAL_BASELINE_WITH: ClassVar[Mapping[str, str | tuple[str, ...]]] = {}
    """Values by flat key that make ``has_local_baseline`` true if it is false by default.

    A tuple lists several such values.
    """
    SUMMED_WITH: ClassVar[Mapping[str, Any]] = {}
    """Settings by flat key with which ``federation.secure-sum`` works, if the defaults do not."""
    READ_ANYWAY: ClassVar[Mapping[tuple[str, str], tuple[str, str]]] = {}
    """Conditions of ``READ_WITH`` that do not hold with a value of the method's own settings.

    From the key that is read and the key of the condition to a key of the method and its value; all
    keys are flat.
    """
    PRUNES: ClassVar[bool] = True
    """True if the method removes weights, heads, channels or blocks."""
    NEEDS_BASE_MODEL: ClassVar[bool] = True
    """True if a site needs the server's base model to take part."""
    MECHANISM: ClassVar[Literal["", "dp-sgd", "sums"]] = ""
    """Mechanism of differential privacy; empty: none, and private runs are refused."""
    NO_MECHANISM: ClassVar[str] = NO_MECHANISM
    """Reason for which private runs are refused."""

    def fits_local_baseline(self, federation: "FederationSettings") -> bool:
        """Return whether clients that took part in no round may fit their own parameters."""
        return False

    @property
    def depends_on_text(self) -> bool:
        """True if the tensors that a client sends depend on its text."""
        return True

    def measures_again(self, rounds: int) -> bool:
        """Return whether a run of this many rounds prunes a layer twice with the same samples."""
        return False

    @property
    def own_weights(self) -> str:
        """Value of ``federation.client-weights`` for which ``auto`` stands."""
        return self.WEIGHTS[0]

    @property
    def has_local_baseline(self) -> bool:
        """True if clients compute a local baseline in a message of its own (``local_baseline``).

        It is false if the rounds already leave a local baseline.
        """
        return False

    @property
    def brings_nf4(self) -> str:
        """Key and value that make clients download a model in NF4; empty if they download none."""
        return ""

    def num_rounds(self, federation: "FederationSettings") -> int:
        """Return the number of rounds as far as the settings define it.

        Methods that prune block by block have as many rounds as the model has blocks.
        """
        return federation.rounds if "rounds" in self.FEDERATION else self.ROUNDS

    def asked_of_sites(self, run: "RunSettings") -> Mapping[str, tuple[str, int]]:
        """Return what one round of training demands of a site; empty if nothing is limited.

        Returns
        -------
        Mapping
            From the name of a limit in the site policy to the keys that cause the demand, in
            words, and its amount.
        """
        return {}

    def last_rounds(
        self, federation: "FederationSettings", num_blocks: Callable[[], int], num_clients: int
    ) -> range:
        """Return the rounds after which a run may end.

        Parameters
        ----------
        num_blocks : returns the number of blocks of the run's model
        """
        return range(self.num_rounds(federation), self.num_rounds(federation) + 1)

    def secure_sum_fault(self, federation: "FederationSettings") -> str:
        """Return which settings need single replies, by ``federation.secure-sum``; empty if none.

        It is a sentence that names the key to change. The row of a method whose server always needs
        single replies says why (``summands_reason``).
        """
        return ""

    def contradictions(
        self, method: str, federation: "FederationSettings", lora: "LoraSettings", num_clients: int
    ) -> list[str]:
        """Return one error line per conflict within this table or with the shared tables."""
        return []


def numbers_of_clients(least: float, most: float, example: str) -> AfterValidator:
    """Return a check of a comma-separated list of numbers above ``least`` and up to ``most``."""

    def fits(part: str) -> bool:
        try:
            return part.isascii() and least < float(part) <= most
        except ValueError:
            return False

    def check(text: str) -> str:
        for part in text.split(",") if text.strip() else ():
            if not fits(part):
                raise ValueError(
                    f"{part.strip()!r} is not a number above {least:g} and up to {most:g}; write"
                    f" numbers with commas between them, for instance {example}"
                )
        return text.strip()

    return AfterValidator(check)


def of_client(numbers: str, client: int) -> str:
    """Return the entry of a client in a comma-separated list, whose last entry repeats."""
    given = numbers.split(",")
    return given[min(client, len(given) - 1)]


class PublicTextSettings(MethodSettings):
    """Settings of the public text."""

    public_text: str = Field(
        "code",
        alias="text",
        min_length=1,
        description=(
            "Public text that the server reads: `documentation` or `code` (the 10% that no client"
            " has), or the path of a text file. It must not be one of `evaluation.texts`."
        ),
    )
    public_samples: int = Field(
        64,
        alias="samples",
        ge=1,
        description=(
            "Number of samples of the public text, of `evaluation.sequence-length` tokens each."
        ),
    )
