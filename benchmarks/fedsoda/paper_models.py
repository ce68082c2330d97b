"""Models of FedSODA's paper: sizes, steps and bytes of their sub-models."""

from dataclasses import dataclass

from benchmarks.fedsoda import counts, paper
from benchmarks.models.footprint import Footprint, footprint
from benchmarks.models.published_models import Tuned, tuned
from espalier.settings.tables.federation import WireDtype
from espalier.settings.tables.lora import LoraSettings


@dataclass(frozen=True)
class Model:
    """One of the paper's models, whole and pruned."""

    name: str
    tuned: Tuned
    """The whole model, with adapters on ``paper.TARGETS`` of every layer."""
    kept: Footprint
    """Footprint of the sub-model."""
    u: int
    """Number of parameters in a layer's adapters."""

    @property
    def title(self) -> str:
        """Name in the paper."""
        return paper.TITLES[self.name]

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Shapes of a layer's matrices, (out, in)."""
        return {linear.name: linear.shape for linear in self.tuned.plan.blocks[0].linears}

    @property
    def layers(self) -> int:
        """Number of layers L, or m^G."""
        return len(self.tuned.plan.blocks)

    @property
    def kept_layers(self) -> int:
        """Number of layers of the sub-model, m^L."""
        return counts.kept_layers(self.layers, paper.PRUNED, paper.GROUPS)

    @property
    def emulator(self) -> int:
        """Number of emulator layers of the sub-model, m^E."""
        return self.kept_layers - paper.ADAPTER_LAYERS

    @property
    def vocabulary(self) -> int:
        """Number of rows of the language-model head."""
        return int(self.tuned.config["vocab_size"])

    @property
    def hidden(self) -> int:
        """Hidden size d_model."""
        return int(self.tuned.config["hidden_size"])

    def communicated(self) -> dict[str, float]:
        """Return the numbers that a client sends and receives in a round, by method."""
        adapter = paper.ADAPTER_LAYERS
        return {
            "FedPETuning": counts.fedpetuning_round(self.u, self.layers),
            "FedOT": counts.fedot_round(self.u, adapter),
            "FedBiOT": counts.fedbiot_round(self.u, adapter, self.emulator),
            "FedSODA": counts.fedsoda_round(self.u, adapter, paper.GROUPS, paper.INTERVAL),
        }

    def sizes(self) -> dict[str, int]:
        """Return the bytes of the weights at a client, by method.

        As in the paper, adapters are left out.
        """
        whole = self.tuned.footprint.weight_bytes("bfloat16")
        kept = self.kept.weight_bytes("bfloat16")
        return {
            "FedPETuning": whole,
            "FedOT": kept,
            "FedBiOT": kept,
            "FedSODA": self.kept.weight_bytes("nf4"),
        }

    def steps(self, tokens: int) -> dict[str, counts.Step]:
        """Return the operations of a training step on one sequence, by what is trained."""
        layer = counts.layer_operations(self.linears, tokens)
        lora = 2 * tokens * self.u
        head = 2 * tokens * self.vocabulary * self.hidden
        aligned = paper.GROUPS
        adapter = paper.ADAPTER_LAYERS
        return {
            "all weights": counts.full_step(layer, head, self.layers),
            "FedPETuning": counts.lora_step(
                layer, lora, head, self.layers, self.layers, self.layers
            ),
            "FedSODA": counts.lora_step(
                layer, lora, head, self.kept_layers, aligned + adapter, adapter
            ),
        }

    def wire_bytes(self, wire_dtype: WireDtype, groups: int, interval: int) -> float:
        """Return the mean bytes of a round's blobs in Espalier's wire format, with blob headers."""
        (block,) = set(self.tuned.blob_bytes(wire_dtype).values())
        return counts.fedsoda_round(block, paper.ADAPTER_LAYERS, groups, interval)


def models() -> list[Model]:
    """Return the paper's three models, counted from their shapes."""
    lora = LoraSettings(rank=paper.RANK, targets=",".join(paper.TARGETS))
    return [_model(name, tuned(name, lora)) for name in paper.TITLES]


def _model(name: str, whole: Tuned) -> Model:
    layers = counts.kept_layers(len(whole.plan.blocks), paper.PRUNED, paper.GROUPS)
    kept = footprint({**whole.config, "num_hidden_layers": layers})
    linears = {linear.name: linear.shape for linear in whole.plan.blocks[0].linears}
    return Model(name, whole, kept, counts.lora_numbers(linears, paper.RANK, paper.TARGETS))
