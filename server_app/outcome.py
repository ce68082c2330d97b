"""What a run leaves in its directory beside numbers: a pruned model and its masks, or adapters; each is loaded and checked."""

from torch import Tensor

from espalier.corpora.tasks.catalogue import task_named
from espalier.modeling.block_stream import BlockStream
from espalier.modeling.computing import Computing
from espalier.modeling.export import check_export, export_edited
from espalier.modeling.export_adapter import check_adapter, check_encoder_adapter, export_adapter
from espalier.modeling.export_encoder import check_encoder, export_encoder
from espalier.training.adapted import AdaptedModel
from espalier.wire.adapters import HEAD_KEY
from server_app.model_card import adapter_card, merged_card, pruned_card
from server_app.public_tests import PublicTests
from server_app.results import Summary, save_masks
from strategies.engine.run import Run
from strategies.results.adapters import AdapterResult
from strategies.results.kept import KeptResult
from strategies.results.votes import VoteResult

A_FEW = 2
"""Windows on which what was written is compared with what was meant."""


def write_outcome(
    run: Run, computing: Computing, result: AdapterResult | KeptResult | VoteResult, tests: PublicTests, summary: Summary
) -> None:
    """Write the result and check it on a few windows of public text, or a few items; ``summary`` gets its figures.

    Raises
    ------
    ExportError
        What was written does not load to the same logits.
    Mistake
        The file system refused.
    """
    summary.report = result.report()
    if tests.num_classes and isinstance(result, AdapterResult):
        _write_encoder_adapter(run, computing, result, tests, summary)
        return
    stream, windows = BlockStream(run.model, computing), next(iter(tests.texts.values()))[:A_FEW]
    if isinstance(result, AdapterResult):
        _write_adapter(run, stream, result, windows, summary)
    else:
        _write_pruned(run, stream, result, windows, summary)


def _write_pruned(run: Run, stream: BlockStream, result: KeptResult | VoteResult, windows: Tensor, summary: Summary) -> None:
    target = run.folder.path / "model"
    summary.masked = save_masks(run.model, result.prune_masks, run.folder.path / "masks.safetensors")
    summary.sparsity = summary.masked + result.zeros_beyond_masks() / run.model.plan.num_weights
    summary.local_sparsity, summary.centralized_sparsity = result.local_sparsity(), result.centralized_sparsity()
    export_edited(run.model, result.edits, target, pruned_card(run.settings, run.model, summary.sparsity))
    check_export(stream, result.edits, target, windows, run.settings.export_check)
    run.progress.note("exported", "exported     model/ reloads to the same logits", sparsity=summary.sparsity)
    summary.where = f"the pruned model is in {target}"


def _write_adapter(run: Run, stream: BlockStream, result: AdapterResult, windows: Tensor, summary: Summary) -> None:
    target = run.folder.path / "adapter"
    export_adapter(run.model, result.adapters, result.tensors, target, adapter_card(run.settings, run.model, result.report()))
    check_adapter(stream, result.edits, target, windows)
    run.progress.note("exported", "exported     adapter/ loads in plain peft to the same logits")
    summary.where = f"the adapter is in {target}"
    if run.settings.lora.merge:
        card = merged_card(run.settings, run.model, result.report())
        export_edited(run.model, result.edits, run.folder.path / "model", card)
        check_export(stream, result.edits, run.folder.path / "model", windows, run.settings.export_check)
        run.progress.note("exported", "exported     model/, with the adapter merged, reloads to the same logits")
        summary.where += f", the merged model in {run.folder.path / 'model'}"


def _write_encoder_adapter(run: Run, computing: Computing, result: AdapterResult, tests: PublicTests, summary: Summary) -> None:
    target = run.folder.path / "adapter"
    export_adapter(run.model, result.adapters, result.tensors, target, adapter_card(run.settings, run.model, result.report()))
    adapted = AdaptedModel.load(run.model, computing, run.settings, result.adapters)
    adapted.set({key: result.tensors(key) for key in result.blobs})
    check_encoder_adapter(run.model, computing, adapted.whole, target, tests.num_classes)
    run.progress.note("exported", "exported     adapter/, with the head, loads in plain peft to the same logits")
    summary.where = f"the adapter, with its classification head, is in {target}"
    if run.settings.lora.merge:
        merged, head = run.folder.path / "model", result.tensors(HEAD_KEY)
        card, classes = merged_card(run.settings, run.model, result.report()), task_named(run.settings.task.name).classes
        export_encoder(run.model, result.edits, head, classes, merged, card)
        check_encoder(run.model, result.edits, head, tests.num_classes, merged, target)
        run.progress.note("exported", "exported     model/, with adapter and head, reloads to the same logits")
        summary.where += f", the merged model in {merged}"
