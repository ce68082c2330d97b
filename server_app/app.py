"""The ServerApp: settings, strategy, start, results."""

import shutil
from contextlib import suppress
from pathlib import Path

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.superlink.grid import GrpcGrid

from espalier.corpora.public_text import public_windows
from espalier.evaluation.perplexity import mean_losses, perplexity
from espalier.modeling.block_stream import BlockStream
from espalier.modeling.computing import Computing, set_up
from espalier.modeling.edits import Edits, dense
from espalier.modeling.export import check_export, export_edited
from espalier.modeling.opened import open_model
from espalier.settings.mistakes import FLOWER_REPORTS_IT_TOO, Mistake
from espalier.settings.node import NodeSettings
from espalier.settings.run import parse
from espalier.storage.blobs import BlobStore
from espalier.wire.evaluation import OWN_TEXT_MODELS
from server_app.results import Summary, save_masks
from server_app.run_directory import open_run_directory
from server_app.table import show
from strategies.baselines.centralized import centralized
from strategies.clock import Clock
from strategies.fedprllm import FedPrLLM
from strategies.fedspallm import FedSpaLLM
from strategies.rounds import RunFailed
from strategies.run import Run

AnyStrategy = FedPrLLM | FedSpaLLM
STRATEGIES: dict[str, type[AnyStrategy]] = {"fedprllm": FedPrLLM, "fedspallm": FedSpaLLM}

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the method that the settings name, and write its results."""
    try:
        run_method(grid, context)
    except (Mistake, RunFailed, OSError) as error:
        print(f"\nthe run failed: {error}\n{FLOWER_REPORTS_IT_TOO}", flush=True)
        raise error.with_traceback(None) from None


def run_method(grid: Grid, context: Context, clock: Clock | None = None) -> Path:
    """Run the method and return the run directory; ``clock`` is real time unless a test gives another.

    Raises
    ------
    Mistake
        A setting, the model or a public text is wrong; nothing was started.
    RunFailed
        Too few clients did their part.
    """
    settings = parse(context.run_config)
    simulation = not isinstance(grid, GrpcGrid)
    if settings.evaluation.centralized == "on" and not simulation:
        raise Mistake(
            "evaluation.centralized = 'on': the pooled-data baseline needs all clients' data in one place and exists in "
            "simulation only; set it to 'off' or 'auto'"
        )
    computing = set_up(settings, Path(settings.out_dir))
    model = open_model(settings.model)
    model.new_skeleton()
    texts = public_windows(settings.evaluation, model.encode)
    folder, lineage = open_run_directory(settings, model, str(context.run_id))
    print(f"run directory {folder.path}", flush=True)
    summary = Summary(settings, model, computing.threads, computing.device.type, losses={name: {} for name in texts})
    run = Run(settings, model, folder, lineage, clock or Clock(), simulation, computing.device)
    started = run.clock.now()
    summary.write(folder, "failed", "the ServerApp is still at work, or it was killed", folder.ledger.total())
    try:
        _work(run, grid, computing, texts, summary, simulation)
    except BaseException as error:
        with suppress(Mistake):  # on a full disk summary.json stays as it is, and says "failed" too
            _note_end(run, summary, started, "failed", f"{type(error).__name__}: {error}")
        raise
    _note_end(run, summary, started, "completed", None)
    show(summary, folder.ledger.total())
    print(f"\nthe pruned model is in {folder.path / 'model'}", flush=True)
    return folder.path


def _note_end(run: Run, summary: Summary, started: float, status: str, reason: str | None) -> None:
    summary.seconds = run.clock.now() - started
    summary.write(run.folder, status, reason, run.folder.ledger.total())


def _work(
    run: Run, grid: Grid, computing: Computing, texts: dict[str, torch.Tensor], summary: Summary, simulation: bool
) -> None:
    """Rounds, export, evaluation; what is finished is in ``summary`` also when a later step fails."""
    strategy = STRATEGIES[run.settings.method](run, texts if run.settings.evaluation.local_only else {})
    try:
        result = strategy.start(grid)
    finally:
        if (rounds := getattr(strategy, "rounds", None)) is not None:
            summary.roster, summary.rounds = rounds.roster, rounds.finished
        if simulation:
            _collect_egress_logs(run)
    stream = BlockStream(run.model, computing)
    summary.masked = save_masks(run.model, strategy.result.prune_masks, run.folder.path / "masks.safetensors")
    summary.sparsity = summary.masked + strategy.result.zeros_beyond_masks() / run.model.plan.num_weights
    summary.local_sparsity, summary.report = strategy.result.local_sparsity(), strategy.result.report()
    summary.centralized_sparsity = strategy.result.centralized_sparsity()
    export_edited(run.model, strategy.result.edits, run.folder.path / "model")
    a_few = next(iter(texts.values()))[:2]
    check_export(stream, strategy.result.edits, run.folder.path / "model", a_few, run.settings.export_check)
    run.progress.note("exported", "exported     model/ reloads to the same logits", sparsity=summary.sparsity)
    _measure(run, stream, strategy, texts, summary, simulation)
    for server_round in result.evaluate_metrics_clientapp.values():
        for key, losses in server_round.items():
            name, _, rank = key.partition("/")
            if name == "loss":
                for text, loss in zip(texts, losses, strict=True):
                    summary.local_perplexities.setdefault(text, {})[int(rank)] = perplexity(loss)
            else:
                summary.own_text[int(rank)] = dict(zip(OWN_TEXT_MODELS, map(perplexity, losses), strict=True))
    if simulation:
        _remove_private_state(run)


def _measure(
    run: Run,
    stream: BlockStream,
    strategy: FedPrLLM | FedSpaLLM,
    texts: dict[str, torch.Tensor],
    summary: Summary,
    simulation: bool,
) -> None:
    """Losses of the dense, the federated and, in simulation, the centralized model."""
    wanted = run.settings.evaluation.centralized
    edits: dict[str, Edits] = {"dense": dense, "federated": strategy.result.edits}
    scratch = run.folder.path / "centralized"
    if simulation and wanted != "off":
        edits["centralized"] = centralized(run, stream, BlobStore(scratch))
    run.progress.begin("evaluating", len(edits))
    for column, made in edits.items():
        losses = mean_losses(stream, texts, made)
        for name, loss in losses.items():
            summary.losses[name][column] = loss
        text = ", ".join(f"{name} {perplexity(loss):.2f}" for name, loss in losses.items())
        run.progress.step("evaluated", f"{column}: {text}", column=column, losses=losses)
    shutil.rmtree(scratch, ignore_errors=True)


def _collect_egress_logs(run: Run) -> None:
    """Simulated sites are on this machine: bring their egress logs into the run directory."""
    for log in sorted((NodeSettings().state_root() / "egress").glob(f"{run.lineage}-*.jsonl")):
        target = run.folder.path / "egress" / f"egress{log.name.removeprefix(run.lineage)}"
        target.parent.mkdir(exist_ok=True)
        shutil.copy(log, target)


def _remove_private_state(run: Run) -> None:
    """A completed simulation leaves nothing in the state directory; at a site of its own, private state stays there."""
    root = NodeSettings().state_root()
    shutil.rmtree(root / run.lineage, ignore_errors=True)
    for log in (root / "egress").glob(f"{run.lineage}-*.jsonl"):
        log.unlink()
