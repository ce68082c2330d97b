"""Work of the methods that walk windows through the model block by block: FedPrLLM, FedSpaLLM, FLAP, SliceGPT."""

from collections.abc import Mapping

from espalier.settings.fedprllm import FedPrLLMSettings
from espalier.settings.fedspallm import FedSpaLLMSettings
from espalier.settings.flap import FlapSettings
from espalier.settings.slicegpt import SliceGptSettings
from espalier.settings.structured import CutSettings
from espalier.wire.plan import ModelPlan
from pruning_kernels.compiled import WORTH_COMPILING
from server_app.planning.memory import Memory, Moment, Process
from server_app.planning.streamed import FLOAT32, FLOAT64, walk
from server_app.planning.work.base import Work

INBOX_STRETCH = 8 * 1024 * 1024
"""Bytes of all clients' masks that are read together."""


class ByBlock(Work):
    """A walk, something watched in each block, and an evaluation."""

    SELECTS = False
    """Whether kernels select weights, or count votes."""

    @property
    def compiles(self) -> bool:
        """Whether kernels are compiled: for large matrices alone."""
        return self.SELECTS and self.sizes.largest_matrix >= WORTH_COMPILING

    @property
    def client_process(self) -> Process:
        """Whose libraries a client has."""
        return "pruning client" if self.compiles else "client"

    @property
    def server_process(self) -> Process:
        """Whose libraries the server has."""
        return "pruning server" if self.compiles else "server"

    def watched(self) -> Mapping[str, int]:
        """What is found out in a block, bytes by what it is."""
        return {}

    def edited(self) -> int:
        """Bytes beside a matrix while it is changed on its way from the file."""
        return 2 * self.sizes.largest_matrix * self.sizes.stored

    def client(self) -> Memory:
        """The walk over calibration windows, then over the evaluation's."""
        walked = walk(self.sizes, *self.windows, self.watched(), "calibrating,")
        return Memory(self.client_process, (*walked, *self.evaluated, self.received()))

    def server(self, simulation: bool) -> Memory:
        """Folding, the export's check, and the evaluation; the baseline walks as a client does, over all windows."""
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
        """Moments of folding replies."""
        return []

    def operations(self) -> float:
        """A pass through each block to watch, and one behind it."""
        windows, tokens = self.windows
        return 2 * self.forward(windows * tokens)

    def square_inputs(self) -> list[int]:
        """Widths of the different inputs in a block, as squares: query, key and value share one, gate and up another."""
        linears = {linear.name: linear.shape[1] for linear in self.model.plan.blocks[0].linears}
        return [linears[name] ** 2 for name in ("attn.q", "attn.o", "mlp.up", "mlp.down")]


class Masking(ByBlock):
    """FedPrLLM: a mask of a byte per weight until it is packed."""

    SELECTS = True

    def watched(self) -> Mapping[str, int]:
        """Masks, and where SparseGPT's score is asked for, the grams of all inputs."""
        masks = {"masks": self.sizes.largest_block}
        if self.settings.of(FedPrLLMSettings).local_metric != "sparsegpt":
            return masks
        return {
            **masks,
            "grams": FLOAT32 * (sum(self.square_inputs()) + 2 * max(self.square_inputs())),
        }

    def folding(self) -> list[Moment]:
        """Votes of a block's matrices, and the weights that decide ties."""
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
    """FedSpaLLM: SparseGPT has the grams of a block, and the matrix that it solves."""

    SELECTS = True

    def watched(self) -> Mapping[str, int]:
        """Grams and factors, the matrix in float32, and the masks and kept weights of the block."""
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
        """Sum, weights and votes of one matrix, and the layer as it is kept."""
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
    """FLAP: mean and spread of two inputs; its result is a smaller model."""

    def result_parameters(self) -> int:
        """Without the share that goes."""
        return smaller(self.model.plan, self.settings.of(FlapSettings))


def smaller(plan: ModelPlan, job: CutSettings, share: float | None = None) -> int:
    """Parameters of a model without ``share`` of what it is a share of, or that of the settings."""
    of_what = plan.num_parameters if job.share_of == "model" else plan.num_weights
    return plan.num_parameters - round((job.share if share is None else share) * of_what)


class Components(ByBlock):
    """SliceGPT: second moments in float64, and their eigenvectors."""

    def watched(self) -> Mapping[str, int]:
        """Of two norms of a block, and of the rows that are added."""
        return {"second moments": 3 * FLOAT64 * self.sizes.width**2}

    def client(self) -> Memory:
        """Also the eigenvectors of one place, and the sliced model where it is evaluated."""
        found = super().client()
        rotated = [self._rotated()] if self.evaluated else []
        return Memory(self.client_process, (*found.moments, self._eigenvectors(), *rotated))

    def folding(self) -> list[Moment]:
        """Moments of a place, pooled, and their eigenvectors; and what is made of the largest tensor when it is written."""
        return [self._eigenvectors(), self._rotated()]

    def result_parameters(self) -> int:
        """All that reads or writes the residual stream is narrower; each block gets two matrices, from basis to basis."""
        sizes = self.sizes
        blocks = len(self.model.plan.blocks)
        width = self.settings.of(SliceGptSettings).width(sizes.width)
        outer = sizes.embeddings + sizes.head  # a head of its own, also where it was tied
        return (
            round((self.model.plan.num_weights + outer) * width / sizes.width)
            + 2 * blocks * width**2
        )

    def _rotated(self) -> Moment:
        """The largest tensor: as it is read, its pieces in float64, all of them together, and as it is stored then."""
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
