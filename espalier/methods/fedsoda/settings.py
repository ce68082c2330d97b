"""Settings of FedSODA: clients tune the last blocks of a pruned, quantised sub-model.

The server keeps the sub-model aligned with the full model.
"""

from typing import ClassVar, Literal

from pydantic import Field

from espalier.amounts import count
from espalier.errors import InputError
from espalier.methods.fedpetuning.settings import AdapterAveraging
from espalier.settings.federation import FederationSettings
from espalier.settings.lora import LoraSettings
from espalier.settings.method import PublicTextSettings
from espalier.settings.table import ReadWith
from espalier.settings.training import MAX_LEARNING_RATE, TrainingSettings


class FedSodaSettings(AdapterAveraging, PublicTextSettings):
    """Table ``[fedsoda]``; FedOT and FedBiOT are other values of the same keys, see their presets.

    The L blocks of the base model are divided into an emulator, which is pruned and stays frozen at
    the clients, and adapter blocks, whose LoRA is trained: the last ``adapter-layers`` and the
    first ``first-layers``.
    """

    FIRST_DELIVERY = 1
    ROUNDS = 10
    NEEDS_BASE_MODEL = False
    READ_WITH: ClassVar[ReadWith] = {
        "uniform-rounding": {"drop": ("uniform",)},
    }

    adapter_layers: int = Field(
        3,
        ge=1,
        description="Number of last blocks in the adapter, whose LoRA the clients train (L_A).",
    )
    first_layers: int = Field(
        0, ge=0, description="Number of first blocks that belong to the adapter too (FedOT: 1)."
    )
    drop: Literal["similar", "uniform"] = Field(
        "similar",
        description=(
            "Blocks of the emulator that are dropped: in `groups` groups of adjacent blocks with"
            " similar outputs all but the first (FedSODA), or as many blocks at equal distances"
            " (FedOT, FedBiOT). The server aligns the LoRA of these first blocks with `similar`,"
            " and that of the whole emulator with `uniform`. `training.proximal` pulls a client's"
            " LoRA to the round's global values with `similar`, and to the initial values"
            " (FedBiOT) with `uniform`."
        ),
    )
    group_layers: int = Field(
        3, ge=0, description="Number of blocks that are dropped from each group (n)."
    )
    groups: int = Field(4, ge=1, description="Number of groups of blocks (p).")
    uniform_rounding: Literal["nearest", "down"] = Field(
        "nearest",
        description=(
            "Rounding of the positions of the blocks that stay, if blocks are dropped at equal"
            " distances: `nearest` as in Offsite-Tuning's code, `down` as in the code of FedOT and"
            " FedBiOT."
        ),
    )
    emulator: Literal["nf4", "stored"] = Field(
        "nf4",
        description=(
            "Format in which clients download the sub-model: its linear layers in NF4, or as"
            " stored in the base model's files."
        ),
    )
    pre_align_steps: int = Field(
        100, ge=0, description="Number of steps of alignment before the first round; 0: none."
    )
    realign_steps: int = Field(50, ge=1, description="Number of steps of a realignment.")
    realign_every: int = Field(
        5, ge=0, description="Number of rounds between realignments (r); 0: none."
    )
    align_learning_rate: float = Field(
        1e-3,
        gt=0,
        le=MAX_LEARNING_RATE,
        description=(
            "Learning rate of alignment (AdamW). A step has `training.batch-size` public samples."
        ),
    )

    @property
    def brings_nf4(self) -> str:
        """Key and value that make clients download a model in NF4; empty if they download none."""
        return "emulator = 'nf4'" if self.emulator == "nf4" else ""

    @property
    def aligns(self) -> bool:
        """True if the server aligns the sub-model at any time."""
        return bool(self.pre_align_steps or self.realign_every)

    def realigns_in(self, server_round: int) -> bool:
        """Return whether a round begins with a realignment at the server (algorithm 2, line 9)."""
        return self.realign_every > 0 and server_round % self.realign_every == 0

    @property
    def num_dropped(self) -> int:
        """Number of blocks that are dropped."""
        return self.group_layers * self.groups

    def pulls_to_first(self, training: TrainingSettings) -> bool:
        """Return whether a proximal term pulls a client's LoRA towards its initial values."""
        return self.drop == "uniform" and training.proximal > 0

    def emulator_of(self, num_blocks: int) -> range:
        """Return the emulator's blocks in a model, full or smaller, with ``num_blocks`` blocks.

        Raises
        ------
        InputError
            No block is left for the emulator.
        """
        blocks = range(self.first_layers, num_blocks - self.adapter_layers)
        if not blocks:
            raise InputError(
                f"fedsoda.adapter-layers = {self.adapter_layers}, first-layers ="
                f" {self.first_layers}: the model has {count(num_blocks, 'block')}, and none is"
                " left for the emulator; lower them"
            )
        return blocks

    def lora_of(self, lora: LoraSettings, num_blocks: int) -> LoraSettings:
        """Return the LoRA settings of the adapter blocks."""
        emulator = self.emulator_of(num_blocks)
        first = f"0-{emulator[0] - 1}," if self.first_layers else ""
        return lora.model_copy(update={"layers": f"{first}{emulator[-1] + 1}-{num_blocks - 1}"})

    def align_training(self, training: TrainingSettings, steps: int) -> TrainingSettings:
        """Return the settings of alignment as a ``[training]`` table."""
        changes = {
            "steps": steps,
            "accumulation": 1,
            "learning-rate": self.align_learning_rate,
            "schedule": "constant",
            "warmup-steps": 0,
            "weight-decay": 0.0,
            "proximal": 0.0,
        }
        return TrainingSettings.model_validate(training.model_dump(by_alias=True) | changes)

    def contradictions(
        self, method: str, federation: FederationSettings, lora: LoraSettings, num_clients: int
    ) -> list[str]:
        """Return one error line per conflict between these tables."""
        lines = super().contradictions(method, federation, lora, num_clients)
        if lora.layers != "all":
            lines.append(
                f"lora.layers = '{lora.layers}': {method}.adapter-layers says which blocks are"
                " adapted; leave it at 'all'"
            )
        if lora.merge and lora.keep_zeros:
            lines.append(
                f"lora.keep-zeros = true: clients of {method} train on another model than the base;"
                " set it to false"
            )
        return lines
