"""The ServerApp: settings, strategy, start, results."""

import shutil
from contextlib import ExitStack, suppress
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.superlink.grid import GrpcGrid

from espalier.evaluation.perplexity import perplexity
from espalier.modeling.computing import Computing, set_up
from espalier.modeling.export import ExportError
from espalier.modeling.limits import require_within_limits
from espalier.modeling.opened import open_model
from espalier.pace.beats import Pace, heard_by
from espalier.settings.mistakes import FLOWER_REPORTS_IT_TOO, RUN_DIRECTORY, Mistake
from espalier.settings.node import NodeSettings
from espalier.settings.run import changed, parse
from espalier.storage.private import remove_run
from espalier.wire.evaluation import OWN_TEXT_MODELS
from server_app.measurement import measure_pruned, measure_tuned
from server_app.model_fit import require_fit
from server_app.outcome import write_outcome
from server_app.public_tests import PublicTests, public_tests
from server_app.results import Summary
from server_app.run_directory import open_run_directory
from server_app.table import closing_line, show
from strategies.engine.clock import Clock
from strategies.engine.rounds import RunFailed
from strategies.engine.run import Run
from strategies.methods.fedpetuning import FedPETuning
from strategies.methods.fedprllm import FedPrLLM
from strategies.methods.fedspallm import FedSpaLLM
from strategies.methods.hetlora import HetLoRA
from strategies.results.adapters import AdapterResult

AnyStrategy = FedPETuning | FedPrLLM | FedSpaLLM
STRATEGIES: dict[str, type[AnyStrategy]] = {
    "fedpetuning": FedPETuning,
    "fedprllm": FedPrLLM,
    "fedspallm": FedSpaLLM,
    "hetlora": HetLoRA,
}

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the method that the settings name, and write its results."""
    try:
        run_method(grid, context)
    except (ExportError, Mistake, RunFailed, OSError) as error:
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
    with ExitStack() as held:
        return _run_method(grid, context, clock or Clock(), held)


def _run_method(grid: Grid, context: Context, clock: Clock, held: ExitStack) -> Path:
    """``run_method``; what ``held`` is given is let go when the run has ended."""
    simulation = not isinstance(grid, GrpcGrid)
    settings = parse(context.run_config, simulation=simulation, by_hand=changed(context.run_config))
    settings = settings.with_quorum(simulation=simulation)
    if settings.evaluation.centralized == "on" and not simulation:
        raise Mistake(
            "evaluation.centralized = 'on': the pooled-data baseline needs all clients' data in one place and exists in "
            "simulation only; set it to 'off' or 'auto'"
        )
    computing = set_up(settings, Path(settings.out_dir))
    with heard_by(Pace(lambda line: print(f"opening      {line}", flush=True))):
        model = open_model(settings.model)
        require_within_limits(settings, model)
        tests = public_tests(settings, model)
        require_fit(settings, model, tests)
    directory = held.enter_context(open_run_directory(settings, model, str(context.run_id)))
    folder, lineage = directory.folder, directory.lineage
    print(f"{RUN_DIRECTORY}{folder.path}", flush=True)
    summary = Summary(settings, model, computing.threads, computing.device.type, losses={name: {} for name in tests.texts})
    run = Run(settings, model, folder, lineage, clock, simulation, computing.device)
    started = run.clock.now()
    at_work = "the ServerApp is still at work, or it was killed"
    summary.write(folder, "failed", at_work, folder.ledger.total(), nobody_asked=True)
    try:
        with heard_by(run.progress.beat):
            _work(run, grid, computing, tests, summary)
    except BaseException as error:
        with suppress(Mistake):  # on a full disk summary.json stays as it is, and says "failed" too
            _note_end(run, summary, started, "failed", f"{type(error).__name__}: {error}")
        raise
    _note_end(run, summary, started, "completed", None)
    directory.note_completed()
    if simulation:
        _remove_private_state(run)
    show(summary, folder.ledger.total())
    print(f"\n{summary.where}\n{closing_line(summary)}", flush=True)
    return folder.path


def _note_end(run: Run, summary: Summary, started: float, status: str, reason: str | None) -> None:
    summary.seconds = run.clock.now() - started
    summary.write(run.folder, status, reason, run.folder.ledger.total())


def _work(run: Run, grid: Grid, computing: Computing, tests: PublicTests, summary: Summary) -> None:
    """Rounds, export, evaluation; what is finished is in ``summary`` also when a later step fails.

    Raises
    ------
    ExportError
        The result was written and measured, but does not load to the same logits.
    """
    strategy = _strategy(run, tests)
    try:
        result = strategy.start(grid)
    finally:
        if (rounds := getattr(strategy, "rounds", None)) is not None:
            summary.roster, summary.rounds = rounds.roster, rounds.finished
        if run.simulation:
            _collect_egress_logs(run)
    fault = None
    try:
        write_outcome(run, computing, strategy.result, tests, summary)
    except ExportError as error:  # what was computed is measured all the same, and stays on disk; then the run says "failed"
        fault = error
        run.progress.note("export_fault", f"export       {error}; the result is measured all the same", reason=str(error))
    if isinstance(strategy.result, AdapterResult):
        measure_tuned(run, computing, strategy.result, tests, summary)
    else:
        measure_pruned(run, computing, strategy.result, tests, summary)
    for server_round in result.evaluate_metrics_clientapp.values():
        for key, figures in server_round.items():
            name, _, client = key.partition("/")
            if name == "loss":
                for text, loss in zip(tests.texts, figures, strict=True):
                    summary.local_perplexities.setdefault(text, {})[int(client)] = perplexity(loss)
            elif name == "test":
                for metric, value in zip(tests.metrics, figures, strict=True):
                    summary.local_scores.setdefault(metric, {})[int(client)] = value
            else:
                summary.own_text[int(client)] = dict(zip(OWN_TEXT_MODELS, map(perplexity, figures), strict=True))
    if fault is not None:
        raise fault


def _strategy(run: Run, tests: PublicTests) -> AnyStrategy:
    """The method's strategy; clients evaluate what they make alone, unless the settings say otherwise."""
    made, local_only = STRATEGIES[run.settings.method], run.settings.evaluation.local_only
    if issubclass(made, FedPETuning):
        return made(
            run, tests.of_clients(run.settings), (tests.encoded, tests.metrics) if tests.encoded and local_only else None
        )
    return made(run, tests.of_clients(run.settings))


def _collect_egress_logs(run: Run) -> None:
    """Simulated sites are on this machine: bring their egress logs into the run directory."""
    for log in sorted((NodeSettings().state_root() / "egress").glob(f"{run.lineage}-*.jsonl")):
        target = run.folder.path / "egress" / f"egress{log.name.removeprefix(run.lineage)}"
        target.parent.mkdir(exist_ok=True)
        shutil.copy(log, target)


def _remove_private_state(run: Run) -> None:
    """A completed simulation leaves nothing of its own in the state directory; at a real site private state stays."""
    root = NodeSettings().state_root()
    remove_run(root, run.lineage)
    if (work := run.work()) is not None:
        work.remove()
    for log in (root / "egress").glob(f"{run.lineage}-*.jsonl"):
        log.unlink(missing_ok=True)
