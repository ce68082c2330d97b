"""FedSODA's result: the adapter in the full model, and metrics of the sub-model.

The adapter is handled like that of every tuning method.
"""

from espalier.evaluation.perplexity import mean_losses, perplexity
from espalier.hf.stream.block_stream import BlockStream
from server_app.artifacts.adapters import AdapterOutcome
from server_app.artifacts.outcome import Outcome
from server_app.report.number_format import figure
from strategies.fedsoda.sub_model import SubModelResult


class SubModelOutcome(Outcome[SubModelResult]):
    """Adapters of the full model with losses and scores, and losses of the clients' sub-model."""

    def write(self, result: SubModelResult) -> None:
        """Write the adapters of the full model for plain peft."""
        self._plugged.write(result.plugged())
        self.summary.where += f", the sub-model in {result.folder}"

    def measure(self, result: SubModelResult) -> None:
        """Evaluate the full model before and after tuning, and the sub-model with all its LoRA."""
        self._plugged.measure(result.plugged())
        if not self.tests.texts:
            return
        losses = mean_losses(
            BlockStream(result.model, self.run.computing), self.tests.texts, result.sub_edits
        )
        self.summary.report["sub_model_perplexity"] = {
            name: perplexity(loss) for name, loss in losses.items()
        }
        self.summary.notes.append(
            "Local-only is the sub-model that a client trained without the others; dense,"
            " centralized and federated are the full model. The sub-model with the federated"
            " adapter is under report.sub_model_perplexity in summary.json."
        )
        text = ", ".join(f"{name} {figure(perplexity(loss))}" for name, loss in losses.items())
        self.run.progress.note("sub_model_evaluated", f"sub-model    {text}", losses=losses)

    @property
    def _plugged(self) -> AdapterOutcome:
        return AdapterOutcome(self.run, self.tests, self.summary)
