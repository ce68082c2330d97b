"""Adapters for plain peft (``adapter/``) and, on request, the merged model (``model/``).

The adapter is handled like that of every tuning method.
"""

from collections.abc import Sequence
from typing import Any

from espalier.data.tasks.catalogue import task_of
from espalier.evaluation.perplexity import mean_losses, perplexity
from espalier.hf.export.adapter import check_adapter, check_encoder_adapter, export_adapter
from espalier.hf.export.chat_template import add_chat_template
from espalier.hf.export.encoder import check_encoder, export_encoder
from espalier.hf.export.model import check_export, export_edited
from espalier.hf.stream.block_stream import BlockStream
from espalier.hf.whole.adapters import merged
from espalier.hf.whole.folded_updates import padded
from espalier.models.adapters import HEAD_KEY, Tensors
from espalier.storage.atomic import finite_values
from espalier.training.adapted_model import AdaptedModel
from server_app.artifacts.outcome import Outcome, in_words, perplexities
from server_app.artifacts.task_scores import scores_of
from server_app.report.model_card import adapter_card, merged_card
from strategies.averaging.adapters import AdapterResult
from strategies.averaging.written_adapters import WrittenAdapters
from strategies.fleet import seconds_of_all
from strategies.tuning.fedsoda.sub_model import SubModelResult

Adapters = AdapterResult | SubModelResult
"""Result that is written as adapters of the base model."""


class AdapterOutcome(Outcome[Adapters]):
    """Adapters, their losses on texts, and their scores on the task's items."""

    def intermediate_metrics(self, result: Adapters, clients: Sequence[int]) -> dict[str, Any]:
        """Return the perplexities or scores of the global adapters.

        ``seconds`` is the time of all rounds so far, if the clock of a simulated fleet provides it.
        """
        written = result.written()
        times = {"seconds": seconds_of_all(written.rounds)} if written.rounds else {}
        tensors = {key: written.tensors(key) for key in written.keys}
        if self.tests.encoded is None:
            return {
                "perplexity": perplexities(self.losses_of(merged(written.adapters, tensors))),
                **times,
            }
        adapted = AdaptedModel.load(
            self.run.model, self.run.computing, self.run.settings, written.adapters
        )
        adapted.set(tensors)
        return {"scores": finite_values(scores_of(self.run, adapted, self.tests)), **times}

    def note_times(self, result: Adapters) -> None:
        """Record the times of the simulated fleet's clock, if there is one."""
        self.summary.take_times(result.written().rounds)

    def write(self, result: Adapters) -> None:
        """Write the adapters, with the classification head of an encoder."""
        written = result.written()
        self.summary.report = written.report
        # Plain adapters would fill the zeros of a pruned base, so only the merged model is written.
        if written.adapters.keep_zeros:
            self._write_merged(written)
            return
        card = adapter_card(self.run.settings, self.run.model, written.report)
        target = self.run.folder.path / "adapter"
        export_adapter(self.run.model, written.adapters, written.tensors, target, card)
        add_chat_template(self.run.settings.task, self.run.model, target)
        if self.tests.num_classes:
            self._check_encoder(written)
        else:
            self._check_decoder(written)

    def _check_decoder(self, result: WrittenAdapters) -> None:
        run = self.run
        target = run.folder.path / "adapter"
        check_adapter(self.stream, result.edits, target, self.few_samples)
        run.progress.note(
            "exported", "exported     adapter/ loads in plain peft to the same logits"
        )
        self.summary.where = f"the adapter is in {target}"
        if run.settings.lora.merge:
            self._write_merged(result)

    def _write_merged(self, result: WrittenAdapters) -> None:
        """Write the base model with merged adapters.

        For a pruned base whose zeros are kept, this is the only output.
        """
        run = self.run
        target = self.run.folder.path / "model"
        card = merged_card(run.settings, run.model, result.report)
        export_edited(run.model, result.edits, target, card)
        add_chat_template(run.settings.task, run.model, target)
        check_export(self.stream, result.edits, target, self.few_samples)
        run.progress.note(
            "exported", "exported     model/, with the adapter merged, reloads to the same logits"
        )
        before = self.summary.where
        self.summary.where = (
            f"{before}, the merged model in {target}"
            if before
            else f"the merged model is in {target}"
        )

    def _check_encoder(self, result: WrittenAdapters) -> None:
        run = self.run
        target = self.run.folder.path / "adapter"
        head = result.tensors(HEAD_KEY)
        check_encoder_adapter(run.model, run.computing, result.edits, head, target)
        run.progress.note(
            "exported",
            "exported     adapter/, with the head, loads in plain peft to the same logits",
        )
        self.summary.where = f"the adapter, with its classification head, is in {target}"
        if run.settings.lora.merge:
            merged_model = run.folder.path / "model"
            card = merged_card(run.settings, run.model, result.report)
            classes = task_of(run.settings).classes
            export_encoder(run.model, result.edits, head, classes, merged_model, card)
            check_encoder(run.model, result.edits, head, merged_model)
            run.progress.note(
                "exported", "exported     model/, with adapter and head, reloads to the same logits"
            )
            self.summary.where += f", the merged model in {merged_model}"

    def measure(self, result: Adapters) -> None:
        """Compute losses on the texts, and scores on the task's items."""
        written = result.written()
        columns: dict[str, Tensors] = {
            "dense": {},
            "federated": {key: written.tensors(key) for key in written.keys},
        }
        pooled: Tensors | None = self.pooled()
        if pooled is not None:
            # The result may include folded updates, which have more ranks than what was trained.
            columns["centralized"] = padded(written.adapters, pooled)
        if self.tests.texts:
            self.measure_texts(
                {column: merged(written.adapters, tensors) for column, tensors in columns.items()}
            )
        if self.tests.encoded is not None:
            self.measure_items(written.adapters, columns)


class SubModelOutcome(Outcome[SubModelResult]):
    """Adapters of the full model with losses and scores, and losses of the clients' sub-model."""

    def write(self, result: SubModelResult) -> None:
        """Write the adapters of the full model for plain peft."""
        self._adapters.write(result)
        self.summary.where += f", the sub-model in {result.folder}"

    def measure(self, result: SubModelResult) -> None:
        """Evaluate the full model before and after tuning, and the sub-model with all its LoRA."""
        self._adapters.measure(result)
        if not self.tests.texts:
            return
        losses = mean_losses(
            BlockStream(result.model, self.run.computing), self.tests.texts, result.sub_edits
        )
        self.summary.report["sub_model_perplexity"] = {
            name: perplexity(loss) for name, loss in losses.items()
        }
        note = (
            "The sub-model with the federated adapter is under report.sub_model_perplexity in"
            " summary.json."
        )
        if self.run.settings.evaluation.local_baseline:
            note = (
                "local-baseline is the sub-model that a client trained without the others, all"
                f" other rows are the full model. {note}"
            )
        self.summary.notes.append(note)
        text = f"sub-model    {in_words(losses)}"
        self.run.progress.note("sub_model_evaluated", text, losses=losses)

    @property
    def _adapters(self) -> AdapterOutcome:
        return AdapterOutcome(self.run, self.tests, self.summary)
