"""Work of LLM-Pruner and LLM-Streamline.

LLM-Pruner needs gradients of the whole model. LLM-Streamline trains a layer that replaces several
blocks.
"""

from espalier.hf.stream.block_stream import windows_per_batch
from espalier.methods.llm_pruner.settings import LlmPrunerSettings
from espalier.methods.llm_streamline.settings import LlmStreamlineSettings
from espalier.training.costs.step_memory import whole_step_bytes
from server_app.estimate.block_stream import FLOAT32, walk
from server_app.estimate.memory import Memory, Moment
from server_app.estimate.work.block_walk import ByBlock, smaller

GRADIENT = 1
MOMENTS = 2
"""Number of values for each trained parameter, in addition to the parameter."""


class WholeGradient(ByBlock):
    """Work of LLM-Pruner: the model in float32, and a gradient for each weight of its blocks."""

    def result_parameters(self) -> int:
        """Return the parameters that remain after the cut."""
        return smaller(self.model.plan, self.settings.of(LlmPrunerSettings))

    def _gradient(self, windows: int, tokens: int) -> Moment:
        job = self.settings.of(LlmPrunerSettings)
        weights = self.model.plan.num_weights
        batch = 1 if job.element == "squared" else min(windows, windows_per_batch(tokens))
        gradients = FLOAT32 * weights
        step = whole_step_bytes(self.model, self.sizes.dtype, batch, tokens)
        # Gradients of earlier batches are already in memory.
        several = windows > batch and job.element == "absolute"
        both = (
            {"gradients": gradients, "a step": step}
            if several
            else {"gradients or a step": max(gradients, step)}
        )
        return Moment(
            "gradients",
            {
                "the whole model": FLOAT32 * self.sizes.parameters,
                **both,
                "a matrix": FLOAT32 * self.sizes.largest_matrix,
            },
        )

    def client(self) -> Memory:
        """Return the memory of the gradient, then of the evaluation."""
        return Memory("client", (self._gradient(*self.windows), *self.evaluated, self.received()))

    def server(self, simulation: bool) -> Memory:
        """Return the server's memory; the baseline computes the gradient of all samples."""
        moments = [*self.exported(), *self.measured(), self.received()]
        if self.settings.makes_centralized(simulation=simulation):
            windows, tokens = self.windows
            moments.append(self._gradient(windows * self.settings.num_clients, tokens))
        return Memory("server", tuple(moments))

    def operations(self) -> float:
        """Return the operations of a forward pass, and of a backward pass with twice as many."""
        windows, tokens = self.windows
        return 3 * self.forward(windows * tokens)


class OneLayer(ByBlock):
    """Work of LLM-Streamline: hidden states around a stretch of blocks, and one trained block."""

    def result_parameters(self) -> int:
        """Return the parameters without the removed blocks."""
        blocks = len(self.model.plan.blocks)
        return (
            self.sizes.parameters
            - self.settings.of(LlmStreamlineSettings).fewer_blocks(blocks)
            * self.sizes.largest_block
        )

    def client(self) -> Memory:
        """Return the memory of the comparison of blocks, the pass to the stretch, and training."""
        windows, tokens = self.windows
        job = self.settings.of(LlmStreamlineSettings)
        hidden = self.sizes.hidden_states(windows, tokens)
        compared = {"hidden states of a stretch": hidden * job.span(len(self.model.plan.blocks))}
        moments = walk(self.sizes, windows, tokens, compared, "comparing blocks,")
        if job.replacement == "layer":
            moments.append(self._training(windows, tokens, hidden))
        return Memory("client", (*moments, *self.evaluated, self.received()))

    def _training(self, windows: int, tokens: int, hidden: int) -> Moment:
        job = self.settings.of(LlmStreamlineSettings)
        layer = FLOAT32 * self.sizes.largest_block
        together = min(windows, windows_per_batch(tokens), job.batch_windows)
        step = 3 * self.sizes.pass_through_block(together, tokens)
        copies = {
            "the layer, as it was and as it began": 2 * layer,
            "gradient and moments": (GRADIENT + MOMENTS) * layer,
        }
        return Moment(
            "training the layer",
            {"hidden states, twice": 2 * hidden, "the layer": layer, **copies, "a step": step},
        )

    def server(self, simulation: bool) -> Memory:
        """Return the server's memory; the centralized baseline trains like a client."""
        moments = [*self.exported(), *self.measured(), self.received()]
        if self.settings.makes_centralized(simulation=simulation):
            windows, tokens = self.windows
            number = windows * self.settings.num_clients
            moments.append(self._training(number, tokens, self.sizes.hidden_states(number, tokens)))
        return Memory("server", tuple(moments))

    def operations(self) -> float:
        """Return the operations of the steps of one layer."""
        job = self.settings.of(LlmStreamlineSettings)
        tokens = self.settings.data.window_tokens
        return 3 * job.steps * self.forward(job.batch_windows * tokens, self.sizes.largest_block)
