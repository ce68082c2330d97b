"""Work of the methods that prune without training adapters."""

from collections.abc import Mapping

from espalier.hf.stream.block_stream import samples_per_batch
from espalier.methods.fedprllm import FedPrLLMSettings
from espalier.methods.fedspallm import FedSpaLLMSettings
from espalier.methods.llm_pruner import LlmPrunerSettings
from espalier.methods.llm_streamline import LlmStreamlineSettings
from espalier.methods.slicegpt import SliceGptSettings
from espalier.models.plan import ModelPlan
from espalier.settings.pruning import StructuredSettings
from pruning_kernels.compiled import WORTH_COMPILING
from server_app.estimate.memory import Moment, Process
from server_app.estimate.sizes import FLOAT32, FLOAT64
from server_app.estimate.step_memory import whole_step_bytes
from server_app.estimate.traffic import RunTraffic
from server_app.estimate.work.base import KEPT_ROUNDS, Work

INBOX_STRETCH = 8 * 1024 * 1024
"""Bytes of all clients' masks that are read together."""
GRADIENT_AND_MOMENTS = 3
"""Number of values for each trained parameter, in addition to the parameter."""


class BlockWalk(Work):
    """Work that consists of a pass through the model with statistics in each block."""

    def watched(self) -> Mapping[str, int]:
        """Return the bytes of a block's statistics, by kind."""
        return {}

    def worked(self, clients: int = 1, name: str = "calibrating,") -> list[Moment]:
        """Return the moments of the pass."""
        num_samples, tokens = self.num_samples
        return self.sizes.walk(clients * num_samples, tokens, name, self.watched())

    def operations(self) -> float:
        """Return the operations of two passes through each block: statistics, then its outputs."""
        num_samples, tokens = self.num_samples
        return 2 * self.forward(num_samples * tokens)

    def client_files(self) -> dict[str, int]:
        """Return the bytes of hidden states, if they are on disk."""
        hidden = 2 * self.hidden_states()
        on_disk = self.settings.activations == "disk"
        return {"hidden states in a file without a name": hidden} if on_disk else {}

    def hidden_states(self) -> int:
        """Return the bytes of the hidden states of all samples between two blocks."""
        num_samples, tokens = self.num_samples
        return num_samples * tokens * self.sizes.width * self.sizes.computed


class Masking(BlockWalk):
    """Work of FedPrLLM: a mask has one byte per weight until it is packed.

    Kernels select weights and count votes. They are compiled for large matrices only.
    """

    def __init__(self, traffic: RunTraffic) -> None:
        super().__init__(traffic)
        compiled: tuple[Process, Process] = ("pruning client", "pruning server")
        if self.sizes.largest_matrix >= WORTH_COMPILING:
            self.processes = compiled
        self.planes = max(1, self.settings.num_clients.bit_length())
        """Number of bits of a vote count."""

    def watched(self) -> Mapping[str, int]:
        """Return the bytes of masks and, for SparseGPT's score, the Gram matrices of all inputs."""
        masks = {"masks": self.sizes.largest_block}
        if self.settings.of(FedPrLLMSettings).local_metric != "sparsegpt":
            return masks
        return {**masks, "grams": self.gram_bytes()}

    def gram_bytes(self) -> int:
        """Return the bytes of a block's Gram matrices, and of two factors of the largest.

        Query, key and value share one input, gate and up another.
        """
        widths = {linear.name: linear.shape[1] for linear in self.plan.blocks[0].linears}
        squares = [widths[name] ** 2 for name in ("attn.q", "attn.o", "mlp.up", "mlp.down")]
        return FLOAT32 * (sum(squares) + 2 * max(squares))

    def aggregated(self) -> list[Moment]:
        """Return the moment of voting: votes of a block, and the weights that decide ties."""
        weights = self.sizes.largest_matrix * (self.sizes.stored + FLOAT32 + 1)
        votes = {
            "planes of votes": self.sizes.largest_block * self.planes // 8,
            "masks of all clients": INBOX_STRETCH,
        }
        return [Moment("voting", {**votes, "a matrix": weights})]

    def client_files(self) -> dict[str, int]:
        """Return the bytes of hidden states, which iterative pruning keeps for the next round."""
        job = self.settings.job
        iterative = isinstance(job, FedPrLLMSettings) and job.strategy == "iterative"
        kept = {"hidden states": KEPT_ROUNDS * self.hidden_states()} if iterative else {}
        return {**kept, **super().client_files()}

    def server_files(self) -> dict[str, int]:
        """Return the bytes of the masks."""
        return {"masks": self.plan.num_weights // 8}


class KeptWeights(Masking):
    """Work of FedSpaLLM: SparseGPT needs a block's Gram matrices, and the matrix that it solves."""

    def watched(self) -> Mapping[str, int]:
        """Return the bytes of a block's statistics and results.

        They are Gram matrices and their factors, one matrix in float32, and masks and kept weights.
        """
        sizes = self.sizes
        kept = sizes.largest_block + sizes.largest_block * sizes.stored // 2
        solved = (2 * FLOAT32 + sizes.stored) * sizes.largest_matrix
        found = {
            "masks and kept weights": kept,
            "a matrix in float32, and its errors": solved,
        }
        if self.settings.of(FedSpaLLMSettings).local_method != "sparsegpt":
            return found
        return {**found, "grams and factors": self.gram_bytes()}

    def aggregated(self) -> list[Moment]:
        """Return the moment of aggregation: sum, weights and votes of a matrix, and the layer."""
        sizes = self.sizes
        numbers = sizes.largest_matrix
        layer = 2 * (sizes.largest_block // 2 * sizes.stored + sizes.largest_block)
        matrix = {
            "sum, weights and mean": numbers * (FLOAT64 + 2 * FLOAT32),
            "votes and mask": numbers * self.planes // 8 + numbers,
        }
        return [Moment("folding", {**matrix, "the layer": layer})]


def smaller(plan: ModelPlan, share: float) -> int:
    """Return the parameters of a model without a fraction of the weights of its blocks."""
    return plan.num_parameters - round(share * plan.num_weights)


class Cut(BlockWalk):
    """Work of FLAP: mean and variance of two inputs; the result is a smaller model."""

    def result_parameters(self) -> int:
        """Return the parameters that remain after the cut."""
        job = self.settings.of(StructuredSettings)
        return smaller(self.plan, job.pruning_ratio)


class WholeGradient(Cut):
    """Work of LLM-Pruner: the model in float32, and a gradient for each weight of its blocks."""

    def worked(self, clients: int = 1, name: str = "") -> list[Moment]:
        """Return the moment of the gradient of all samples."""
        job = self.settings.of(LlmPrunerSettings)
        num_samples = clients * self.num_samples[0]
        tokens = self.num_samples[1]
        batch = 1 if job.element == "squared" else min(num_samples, samples_per_batch(tokens))
        gradients = FLOAT32 * self.plan.num_weights
        step = whole_step_bytes(self.model, self.sizes.dtype, batch, tokens)
        both = {"gradients or a step": max(gradients, step)}
        # Gradients of earlier batches are already in memory.
        if num_samples > batch and job.element == "absolute":
            both = {"gradients": gradients, "a step": step}
        model = {"the whole model": FLOAT32 * self.sizes.parameters}
        matrix = {"a matrix": FLOAT32 * self.sizes.largest_matrix}
        return [Moment("gradients", {**model, **both, **matrix})]

    def operations(self) -> float:
        """Return the operations of a forward pass, and of a backward pass with twice as many."""
        num_samples, tokens = self.num_samples
        return 3 * self.forward(num_samples * tokens)


class OneLayer(BlockWalk):
    """Work of LLM-Streamline: hidden states around a stretch of blocks, and one trained block."""

    def __init__(self, traffic: RunTraffic) -> None:
        super().__init__(traffic)
        self.job = self.settings.of(LlmStreamlineSettings)

    def result_parameters(self) -> int:
        """Return the parameters without the removed blocks."""
        removed = self.job.fewer_blocks(len(self.plan.blocks))
        return self.sizes.parameters - removed * self.sizes.largest_block

    def watched(self) -> Mapping[str, int]:
        """Return the bytes of hidden states of a stretch."""
        span = self.job.span(len(self.plan.blocks))
        return {"hidden states of a stretch": span * self.sizes.hidden_states(*self.num_samples)}

    def worked(self, clients: int = 1, name: str = "comparing blocks,") -> list[Moment]:
        """Return the moments of the comparison of blocks, and of training."""
        trained = [self._training(clients)] if self.job.replacement == "layer" else []
        return super().worked(clients, name) + trained

    def client_files(self) -> dict[str, int]:
        """Return the bytes of hidden states before and behind the layer."""
        found = super().client_files()
        if self.job.replacement == "layer":
            found["hidden states"] = 2 * self.hidden_states()
        return found

    def pooled(self) -> list[Moment]:
        """Return the moment of training on all text."""
        return [self._training(self.settings.num_clients)]

    def _training(self, clients: int) -> Moment:
        num_samples = clients * self.num_samples[0]
        tokens = self.num_samples[1]
        layer = FLOAT32 * self.sizes.largest_block
        together = min(num_samples, samples_per_batch(tokens), self.job.batch_size)
        contents = {
            "hidden states, twice": 2 * self.sizes.hidden_states(num_samples, tokens),
            "the layer": layer,
            "the layer, as it was and as it began": 2 * layer,
            "gradient and moments": GRADIENT_AND_MOMENTS * layer,
            "a step": 3 * self.sizes.pass_through_block(together, tokens),
        }
        return Moment("training the layer", contents)

    def operations(self) -> float:
        """Return the operations of the steps of one layer."""
        tokens = self.job.batch_size * self.num_samples[1]
        return 3 * self.job.steps * self.forward(tokens, self.sizes.largest_block)


class Components(BlockWalk):
    """Work of SliceGPT: second moments in float64, and their eigenvectors."""

    def __init__(self, traffic: RunTraffic) -> None:
        super().__init__(traffic)
        self.job = self.settings.of(SliceGptSettings)
        self.width = self.job.width(self.sizes.width)
        """Width of the residual stream after slicing."""

    def watched(self) -> Mapping[str, int]:
        """Return the bytes of second moments of a block's two norms, and of the added rows."""
        return {"second moments": 3 * FLOAT64 * self.sizes.width**2}

    def finished(self) -> list[Moment]:
        """Return the moments of eigenvectors of one norm, and of the evaluated sliced model."""
        return self.aggregated() if self.evaluated() else self.aggregated()[:1]

    def result_parameters(self) -> int:
        """Return the parameters of the sliced model.

        All matrices that read or write the residual stream are narrower. Each block has two
        additional matrices that change the basis. The model has its own head, even if the base's is
        tied to the embeddings.
        """
        numbers = self.plan.num_weights + self.sizes.embeddings + self.sizes.head
        narrower = round(numbers * self.width / self.sizes.width)
        return narrower + 2 * len(self.plan.blocks) * self.width**2

    def aggregated(self) -> list[Moment]:
        """Return the moments of eigendecomposition, and of the rotation of the largest tensor.

        The tensor exists as read, as float64 pieces, as their concatenation, and in the dtype of
        the files.
        """
        sizes = self.sizes
        held = {"moments and eigenvectors": 6 * FLOAT64 * sizes.width**2}
        if self.job.covariances == "clients":
            held["moments as they were sent"] = 2 * FLOAT64 * sizes.width * (sizes.width + 1) // 2
        largest = max(sizes.embeddings, sizes.head, sizes.largest_matrix)
        made = largest // sizes.width * self.width
        rotated = {
            "bases": 3 * FLOAT64 * sizes.width * self.width,
            "the tensor": sizes.stored * (largest + made),
            "in float64": 2 * FLOAT64 * made,
        }
        return [Moment("finding components", held), Moment("rotating a tensor", rotated)]
