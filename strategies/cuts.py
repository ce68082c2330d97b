"""Results that change weights: removed groups with biases or scales, edits of a block's weights."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from numpy.typing import NDArray

from espalier.hf.opening.opened_model import OpenedModel, check_labels
from espalier.hf.stream.edits import BlobEdits, WeightEdit, edits_from
from espalier.hf.structured.export import require_writable
from espalier.hf.structured.selection import open_cut
from espalier.messages.blobs.cuts import scales_of
from espalier.messages.message import NoFields
from espalier.messages.tensor_blobs import pack_tensors, unpack_tensors
from espalier.models.structure import BlockStructure
from espalier.settings.pruning import StructuredSettings
from espalier.settings.run import RunSettings
from strategies.base.evaluation import ClientEvaluation
from strategies.base.method import Method, RunResult
from strategies.base.run import Run


class CutResult(RunResult):
    """Smaller model, available when the cut is decided.

    ``biases`` names the matrices that get a bias, ``scaled`` the kinds of groups that get scales.
    """

    STATE = ("blobs",)

    def __init__(self, run: Run, biases: Sequence[str] = (), scaled: Sequence[str] = ()) -> None:
        self.run = run
        self.base = run.model
        self.store = run.checkpoint.blobs
        self.biases = tuple(biases)
        self.scaled = tuple(scaled)
        self.blobs: list[str] = []
        """Hash of each block's blob."""
        self._opened: tuple[list[str], OpenedModel] | None = None
        """Model and the hashes of the blobs with which it was opened."""

    def stored(self) -> list[str]:
        """Return the hashes of all blobs that the state names."""
        return self.blobs

    def blob(self, index: int) -> bytes:
        """Return the cut of one block as it is sent."""
        return self.store.get(self.blobs[index])

    def keep(self, blobs: Iterable[bytes]) -> None:
        """Store the decision on each block."""
        self.run.progress.begin("cutting", len(self.base.plan.blocks))
        for index, blob in enumerate(blobs):
            # One blob per block, appended in block order.
            self.blobs.append(self.store.put(blob))
            self.run.progress.step("cut", f"block {index}", block=index)

    def replace(self, blobs: Iterable[bytes]) -> None:
        """Store the decision on each block again, with scales."""
        self.blobs = [self.store.put(blob) for blob in blobs]

    def push(self, server_round: int) -> None:
        """Push the decisions to the clients, if they evaluate models on their own text."""
        if self.run.settings.evaluation.own_text:
            plan = self.base.plan
            self.run.rounds.push_all(
                server_round, NoFields(), lambda key: self.blob(plan.block(key).index)
            )

    @property
    def model(self) -> OpenedModel:
        """Smaller model; it is opened once for the same decision."""
        if self._opened is None or self._opened[0] != self.blobs:
            self._opened = list(self.blobs), open_cut(self.base, self.blob, self.biases)
        return self._opened[1]

    def report(self) -> dict[str, Any]:
        """Return the group counts of each block, and the range of its scales if it has some."""
        small = self.model
        # ``open_cut`` always gives the model a structure.
        assert small.structure is not None
        blocks = small.structure.blocks
        report: dict[str, Any] = {
            "groups_of_blocks": [
                {"groups": block.sizes.groups, "channels": block.sizes.channels} for block in blocks
            ],
        }
        return report | (
            {"scales_of_blocks": [self._scales(block) for block in blocks]} if self.scaled else {}
        )

    def _scales(self, block: BlockStructure) -> dict[str, list[float]]:
        """Return the smallest and largest scale of a block's kept groups, by kind."""
        scales = {
            # Only scales of remaining groups: others have no meaning.
            kind: values[list(block.kept(kind))]
            for kind, values in scales_of(unpack_tensors(self.blob(block.source))).items()
        }
        return {kind: [float(values.min()), float(values.max())] for kind, values in scales.items()}


def require_cuttable(
    settings: RunSettings, model: OpenedModel, blocks: range, biases: Sequence[str] = ()
) -> None:
    """Refuse encoders, impossible pruning ratios, and results that cannot be written.

    Some forms of output cannot hold a model whose blocks differ in shape. ``biases`` names the
    matrices that get a bias.
    """
    check_labels(model.family, None, str(model.directory / "config.json"))
    model.require_groups(heads=False)
    require_writable(model, settings.of(StructuredSettings), biases, blocks)


class EditResult(RunResult):
    """Tensors of a result, in the checkpoint's blobs, and the edits of weights by them."""

    STATE = ("hashes",)

    def __init__(self, run: Run, edits: BlobEdits) -> None:
        self.settings = run.settings
        self.store = run.checkpoint.blobs
        self.functions = edits
        self.hashes: dict[str, str] = {}
        """Hash of each blob, by key."""

    def stored(self) -> list[str]:
        """Return the hashes of all blobs that the state names."""
        return list(self.hashes.values())

    def put(self, key: str, tensors: Mapping[str, NDArray]) -> None:
        """Store the tensors of a blob."""
        self.hashes[key] = self.store.put(pack_tensors(tensors))

    def blob(self, key: str) -> bytes:
        """Return a blob by its key."""
        return self.store.get(self.hashes[key])

    def edits(self, index: int) -> Mapping[str, WeightEdit]:
        """Return the edits of one block's weights."""
        blobs = {key: self.blob(key) for key in self.hashes}
        return edits_from(self.functions, blobs, self.settings)(index)

    def report(self) -> dict[str, Any]:
        """Return the method's own entries of ``summary.json``: none."""
        return {}


class Editing(Method):
    """Method whose result has the tensors of a client's reply; ``fold`` puts them in ``result``."""

    EDITS: ClassVar[BlobEdits]
    """Edits of weights by the tensors of the result."""

    result: EditResult

    def __init__(self, run: Run, evaluation: ClientEvaluation) -> None:
        super().__init__(run, evaluation)
        self.result = EditResult(run, self.EDITS)

    def push_result(self, server_round: int) -> None:
        """Push the result to the clients, part by part, for the evaluation on their own text."""
        if self.run.settings.evaluation.own_text:
            self.rounds.push_all(server_round, NoFields(), self.result.blob)
