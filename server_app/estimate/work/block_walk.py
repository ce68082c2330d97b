"""Work of the methods that pass samples through the model block by block.

They are FedPrLLM, FedSpaLLM, FLAP and SliceGPT.
"""

from collections.abc import Mapping

from espalier.methods.fedprllm.settings import FedPrLLMSettings
from espalier.methods.fedspallm.settings import FedSpaLLMSettings
from espalier.methods.flap.settings import FlapSettings
from espalier.methods.slicegpt.settings import SliceGptSettings
from espalier.models.plan import ModelPlan
from espalier.settings.structured import CutSettings
from pruning_kernels.compiled import WORTH_COMPILING
from server_app.estimate.block_stream import FLOAT32, FLOAT64, walk
from server_app.estimate.memory import Memory, Moment, Process
from server_app.estimate.work.base import Work

INBOX_STRETCH = 8 * 1024 * 1024
"""Bytes of all clients' masks that are read together."""


class ByBlock(Work):
    """Work that consists of a pass with statistics in each block, and an evaluation."""

    SELECTS = False
    """True if kernels select weights or count votes."""

    @property
    def compiles(self) -> bool:
        """True if kernels are compiled, which happens for large matrices only."""
        return self.SELECTS and self.sizes.largest_matrix >= WORTH_COMPILING

    @property
    def client_process(self) -> Process:
        """Type of the client's process, which determines its libraries."""
        return "pruning client" if self.compiles else "client"

    @property
    def server_process(self) -> Process:
        """Type of the server's process, which determines its libraries."""
        return "pruning server" if self.compiles else "server"

    def watched(self) -> Mapping[str, int]:
        """Return the bytes of a block's statistics, by kind."""
        return {}

    def edited(self) -> int:
        """Return the additional bytes for a matrix that is changed while it is read."""
        return 2 * self.sizes.largest_matrix * self.sizes.stored

    def client(self) -> Memory:
        """Return the memory of the calibration, then of the evaluation."""
        walked = walk(self.sizes, *self.windows, self.watched(), "calibrating,")
        return Memory(self.client_process, (*walked, *self.evaluated, self.received()))

    def server(self, simulation: bool) -> Memory:
        """Return the memory of aggregation, check of the export, and evaluation.

        The centralized baseline works like a client with the samples of all clients.
        """
        moments = [*self.folding(), *self.exported(), *self.measured(), self.received()]
        if self.settings.makes_centralized(simulation=simulation):
            windows, tokens = self.windows
            moments += walk(
                self.sizes,
                windows * self.settings.num_clients,
                tokens,
                self.watched(),
                "pooled data,",
            )
        return Memory(self.server_process, tuple(moments))

    def folding(self) -> list[Moment]:
        """Return the moments of the aggregation of replies."""
        return []

    def operations(self) -> float:
        """Return the operations of two passes through each block: statistics, then its outputs."""
        windows, tokens = self.windows
        return 2 * self.forward(windows * tokens)

    def square_inputs(self) -> list[int]:
        """Return the squared widths of the different inputs in a block.

        Query, key and value share one input, gate and up another.
        """
        linears = {linear.name: linear.shape[1] for linear in self.model.plan.blocks[0].linears}
        return [linears[name] ** 2 for name in ("attn.q", "attn.o", "mlp.up", "mlp.down")]


class Masking(ByBlock):
    """Work of FedPrLLM: a mask has one byte per weight until it is packed."""

    SELECTS = True

    def watched(self) -> Mapping[str, int]:
        """Return the bytes of masks and, for SparseGPT's score, the Gram matrices of all inputs."""
        masks = {"masks": self.sizes.largest_block}
        if self.settings.of(FedPrLLMSettings).local_metric != "sparsegpt":
            return masks
        return {
            **masks,
            "grams": FLOAT32 * (sum(self.square_inputs()) + 2 * max(self.square_inputs())),
        }

    def folding(self) -> list[Moment]:
        """Return the moment of voting: votes of a block, and the weights that decide ties."""
        numbers = self.sizes.largest_matrix
        planes = max(1, self.settings.num_clients.bit_length())
        votes = {
            "planes of votes": self.sizes.largest_block * planes // 8,
            "masks of all clients": INBOX_STRETCH,
        }
        return [
            Moment("voting", {**votes, "a matrix": numbers * (self.sizes.stored + FLOAT32 + 1)})
        ]


class KeptWeights(ByBlock):
    """Work of FedSpaLLM: SparseGPT needs a block's Gram matrices, and the matrix that it solves."""

    SELECTS = True

    def watched(self) -> Mapping[str, int]:
        """Return the bytes of a block's statistics and results.

        They are Gram matrices and their factors, one matrix in float32, and masks and kept weights.
        """
        sizes = self.sizes
        job = self.settings.of(FedSpaLLMSettings)
        kept = {
            "masks and kept weights": sizes.largest_block + sizes.largest_block * sizes.stored // 2
        }
        solved = {
            "a matrix in float32, and its errors": (
                2 * FLOAT32 * sizes.largest_matrix + sizes.stored * sizes.largest_matrix
            )
        }
        if job.local_method != "sparsegpt":
            return {**kept, **solved}
        grams = FLOAT32 * (sum(self.square_inputs()) + 2 * max(self.square_inputs()))
        return {**kept, **solved, "grams and factors": grams}

    def folding(self) -> list[Moment]:
        """Return the moment of aggregation: sum, weights and votes of a matrix, and the layer."""
        numbers = self.sizes.largest_matrix
        planes = max(1, self.settings.num_clients.bit_length())
        matrix = {
            "sum, weights and mean": numbers * (FLOAT64 + 2 * FLOAT32),
            "votes and mask": numbers * planes // 8 + numbers,
        }
        layer = {
            "the layer": (
                2 * (self.sizes.largest_block // 2 * self.sizes.stored + self.sizes.largest_block)
            )
        }
        return [Moment("folding", {**matrix, **layer})]


class Fluctuations(ByBlock):
    """Work of FLAP: mean and variance of two inputs; the result is a smaller model."""

    def result_parameters(self) -> int:
        """Return the parameters that remain after the cut."""
        return smaller(self.model.plan, self.settings.of(FlapSettings))


def smaller(plan: ModelPlan, job: CutSettings, share: float | None = None) -> int:
    """Return the parameters of a model after the cut.

    ``share`` is the pruning ratio, by default that of the settings. It refers to the blocks'
    weights.
    """
    return plan.num_parameters - round((job.share if share is None else share) * plan.num_weights)


class Components(ByBlock):
    """Work of SliceGPT: second moments in float64, and their eigenvectors."""

    def watched(self) -> Mapping[str, int]:
        """Return the bytes of second moments of a block's two norms, and of the added rows."""
        return {"second moments": 3 * FLOAT64 * self.sizes.width**2}

    def client(self) -> Memory:
        """Return the memory, including eigenvectors of one norm, and the evaluated sliced model."""
        found = super().client()
        rotated = [self._rotated()] if self.evaluated else []
        return Memory(self.client_process, (*found.moments, self._eigenvectors(), *rotated))

    def folding(self) -> list[Moment]:
        """Return the moments of eigendecomposition, and of the rotation of the largest tensor."""
        return [self._eigenvectors(), self._rotated()]

    def result_parameters(self) -> int:
        """Return the parameters of the sliced model.

        All matrices that read or write the residual stream are narrower. Each block has two
        additional matrices that change the basis.
        """
        sizes = self.sizes
        blocks = len(self.model.plan.blocks)
        width = self.settings.of(SliceGptSettings).width(sizes.width)
        # The sliced model has its own head, even if the base's is tied to the embeddings.
        outer = sizes.embeddings + sizes.head
        return (
            round((self.model.plan.num_weights + outer) * width / sizes.width)
            + 2 * blocks * width**2
        )

    def _rotated(self) -> Moment:
        """Return the moment of the largest rotated tensor.

        It exists as read, as float64 pieces, as their concatenation, and in the dtype of the files.
        """
        sizes = self.sizes
        width = self.settings.of(SliceGptSettings).width(sizes.width)
        largest = max(sizes.embeddings, sizes.head, sizes.largest_matrix)
        made = largest // sizes.width * width
        bases = {"bases": 3 * FLOAT64 * sizes.width * width}
        return Moment(
            "rotating a tensor",
            {
                **bases,
                "the tensor": sizes.stored * (largest + made),
                "in float64": 2 * FLOAT64 * made,
            },
        )

    def _eigenvectors(self) -> Moment:
        held = {"moments and eigenvectors": 6 * FLOAT64 * self.sizes.width**2}
        if self.settings.of(SliceGptSettings).covariances == "clients":
            held["moments as they were sent"] = (
                2 * FLOAT64 * self.sizes.width * (self.sizes.width + 1) // 2
            )
        return Moment("finding components", held)
