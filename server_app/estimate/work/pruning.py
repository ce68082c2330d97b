"""Memory and computation of the methods that prune without training adapters."""

from collections.abc import Mapping

from espalier.hf.stream.block_stream import samples_per_batch
from espalier.methods.pruning.fedprllm import FedPrLLMSettings
from espalier.methods.pruning.fedspallm import FedSpaLLMSettings
from espalier.methods.pruning.llm_pruner import LlmPrunerSettings
from espalier.methods.pruning.llm_streamline import LlmStreamlineSettings
from espalier.methods.pruning.pooled_pruning import shared_inputs
from espalier.methods.pruning.slicegpt import SliceGptSettings
from espalier.models.structure import COLUMNS
from espalier.settings.pruning import MaskingSettings, StructuredSettings
from espalier.storage.client_state import ROUNDS_KEPT
from pruning_kernels.compiler import WORTH_COMPILING
from server_app.estimate.messages.traffic import RunTraffic
from server_app.estimate.work.memory import Moment
from server_app.estimate.work.sizes import FLOAT32, FLOAT64
from server_app.estimate.work.step_memory import whole_step_bytes
from server_app.estimate.work.work import GRADIENT_AND_MOMENTS, Work, smaller


class BlockWalk(Work):
    """Work that consists of a pass through the model with statistics in each block."""

    def watched(self) -> Mapping[str, int]:
        """Return the bytes of a block's statistics, by kind."""
        return {}

    def worked(self, clients: int = 1) -> list[Moment]:
        """Return the moments of the pass."""
        num_samples = clients * self.num_samples
        return self.sizes.walk(num_samples, self.tokens, "calibrating,", self.watched())

    def operations(self) -> float:
        """Return the operations of two passes through each block: statistics, then its outputs."""
        return 2 * self.forward(self.num_samples * self.tokens)

    def client_files(self) -> dict[str, int]:
        """Return the bytes of hidden states, if they are on disk."""
        on_disk = self.settings.activations == "disk"
        return {"hidden states in a file without a name": 2 * self.hidden()} if on_disk else {}

    def hidden(self) -> int:
        """Return the bytes of the hidden states of all samples between two blocks."""
        return self.num_samples * self.tokens * self.sizes.width * self.sizes.computed


class Masking(BlockWalk):
    """Work of FedPrLLM: a mask has one byte per weight until it is packed.

    Kernels select weights and count votes. They are compiled for large matrices only.
    """

    def __init__(self, traffic: RunTraffic) -> None:
        super().__init__(traffic)
        if self.sizes.largest_matrix >= WORTH_COMPILING:
            self.processes = ("pruning client", "pruning server")

    def watched(self) -> Mapping[str, int]:
        """Return the bytes of masks and, for SparseGPT's score, the Gram matrices of all inputs."""
        masks = {"masks": self.sizes.largest_block}
        if self.settings.of(FedPrLLMSettings).metric != "sparsegpt":
            return masks
        return {**masks, "grams": self.gram_bytes()}

    def gram_bytes(self) -> int:
        """Return the bytes of a block's Gram matrices, and of two factors of the largest.

        Query, key and value share one input, gate and up another.
        """
        # Matrices that read residual dimensions of one kind, or groups of one kind, share an input.
        widths = {COLUMNS[linear.name]: linear.shape[1] for linear in self.plan.blocks[0].linears}
        squares = [width**2 for width in widths.values()]
        return FLOAT32 * (sum(squares) + 2 * max(squares))

    def client_files(self) -> dict[str, int]:
        """Return the bytes of hidden states, which iterative pruning keeps for the next round."""
        job = self.settings.job
        iterative = isinstance(job, MaskingSettings) and job.strategy == "iterative"
        kept = {"hidden states": ROUNDS_KEPT * self.hidden()} if iterative else {}
        return {**kept, **super().client_files()}

    def server_files(self) -> dict[str, int]:
        """Return the bytes of the masks."""
        # One bit per weight.
        return {"masks": self.plan.num_weights // 8}


class Pooled(Masking):
    """Work of pooled pruning: a client adds squares, and the server selects weights."""

    def __init__(self, traffic: RunTraffic) -> None:
        super().__init__(traffic)
        # Only a local baseline makes a client select weights, with the compiled kernels.
        if self.processes[0] == "pruning client" and not self.settings.evaluation.local_baseline:
            self.processes = ("client", "pruning server")

    def watched(self) -> Mapping[str, int]:
        """Return the bytes of a block's sums, which every matrix has, and of masks of its own."""
        masks = self.sizes.largest_block if self.settings.evaluation.local_baseline else 0
        block = self.plan.blocks[0]
        return {"sums": FLOAT64 * sum(linear.shape[1] for linear in block.linears), "masks": masks}

    def operations(self) -> float:
        """Return the operations of the passes through each block: one if all are dense."""
        one_shot = self.settings.of(MaskingSettings).strategy == "one-shot"
        return super().operations() / (2 if one_shot else 1)

    def server_files(self) -> dict[str, int]:
        """Return the bytes of masks and sums."""
        inputs = sum(
            block.linear(name).shape[1]
            for block in self.plan.blocks
            for name in set(shared_inputs(block).values())
        )
        return {**super().server_files(), "sums": 2 * FLOAT64 * inputs}


class KeptWeights(Masking):
    """Work of FedSpaLLM: SparseGPT needs a block's Gram matrices, and the matrix that it solves."""

    def watched(self) -> Mapping[str, int]:
        """Return the bytes of masks, kept weights, a matrix in float32, and Gram matrices."""
        sizes = self.sizes
        tensors = {
            "masks and kept weights": sizes.largest_block + sizes.largest_block * sizes.stored // 2,
            "a matrix in float32, and its errors": (
                (2 * FLOAT32 + sizes.stored) * sizes.largest_matrix
            ),
        }
        if self.settings.of(FedSpaLLMSettings).local_method == "sparsegpt":
            tensors["grams and factors"] = self.gram_bytes()
        return tensors


class CutWork(BlockWalk):
    """Work of FLAP: mean and variance of two inputs; the result is a smaller model."""

    def result_parameters(self) -> int:
        """Return the parameters that remain after the cut."""
        return smaller(self.plan, self.settings.of(StructuredSettings).pruning_ratio)


class WholeGradient(CutWork):
    """Work of LLM-Pruner: the model in float32, and a gradient for each weight of its blocks."""

    def worked(self, clients: int = 1) -> list[Moment]:
        """Return the moment of the gradient of all samples."""
        element = self.settings.of(LlmPrunerSettings).element
        num_samples = clients * self.num_samples
        batch = 1 if element == "squared" else min(num_samples, samples_per_batch(self.tokens))
        gradients = FLOAT32 * self.plan.num_weights
        step = whole_step_bytes(self.model, self.sizes.dtype, batch, self.tokens)
        both = {"gradients or a step": max(gradients, step)}
        # Gradients of earlier batches are already in memory.
        if num_samples > batch and element == "absolute":
            both = {"gradients": gradients, "a step": step}
        model = {"the whole model": FLOAT32 * self.sizes.parameters}
        matrix = {"a matrix": FLOAT32 * self.sizes.largest_matrix}
        return [Moment("gradients", {**model, **both, **matrix})]

    def operations(self) -> float:
        """Return the operations of a forward pass, and of a backward pass with twice as many."""
        return 3 * self.forward(self.num_samples * self.tokens)


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
        hidden = self.sizes.hidden_states(self.num_samples, self.tokens)
        return {"hidden states of a stretch": span * hidden}

    def client_files(self) -> dict[str, int]:
        """Return the bytes of hidden states before and behind the layer."""
        files = {"hidden states": 2 * self.hidden()} if self.job.replacement == "layer" else {}
        return {**super().client_files(), **files}

    def worked(self, clients: int = 1) -> list[Moment]:
        """Return the moments of the comparison of blocks, and of training."""
        moments = super().worked(clients)
        if self.job.replacement != "layer":
            return moments
        num_samples = clients * self.num_samples
        layer = FLOAT32 * self.sizes.largest_block
        together = min(num_samples, samples_per_batch(self.tokens), self.job.batch_size)
        contents = {
            "hidden states, twice": 2 * self.sizes.hidden_states(num_samples, self.tokens),
            "the layer": layer,
            "the layer, as it was and as it began": 2 * layer,
            "gradient and moments": GRADIENT_AND_MOMENTS * layer,
            "a step": 3 * self.sizes.pass_through_block(together, self.tokens),
        }
        return [*moments, Moment("training the layer", contents)]

    def operations(self) -> float:
        """Return the operations of the steps of one layer."""
        tokens = self.job.batch_size * self.tokens
        # A backward pass takes twice the operations of a forward pass.
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

    def worked(self, clients: int = 1) -> list[Moment]:
        """Return the moments of the pass, and of a client's evaluation of the sliced model."""
        moments = super().worked(clients)
        return [*moments, *self.aggregated()] if self.num_evaluated() else moments

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
        """Return the moment of the rotation of the largest tensor.

        The tensor exists as read, as float64 pieces, as their concatenation, and in the dtype of
        the files.
        """
        sizes = self.sizes
        largest = max(sizes.embeddings, sizes.head, sizes.largest_matrix)
        made = largest // sizes.width * self.width
        rotated = {
            "bases": 3 * FLOAT64 * sizes.width * self.width,
            "the tensor": sizes.stored * (largest + made),
            "in float64": 2 * FLOAT64 * made,
        }
        return [Moment("rotating a tensor", rotated)]
