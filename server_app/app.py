"""One run at the server: from the settings to the strategy, its start and its results."""

import shutil
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid

from espalier.errors import FLOWER_REPORTS_IT_TOO, RUN_DIRECTORY, EspalierError, InputError
from espalier.flower.pulls import ask_again_soon
from espalier.flower.shared_nodes import is_simulation, with_enough_nodes
from espalier.hf.export.model import ExportError
from espalier.hf.machine.computing import set_up
from espalier.hf.opening.base_check import require_within_limits
from espalier.hf.opening.opened_model import open_model
from espalier.identity.site_keys import public_keys
from espalier.privacy.guarantee import require_reachable_epsilon
from espalier.progress import Throttle, progress_listener
from espalier.results.finished_run import open_run
from espalier.results.report.page import FILE as REPORT
from espalier.results.report.page import write_report
from espalier.results.run_status import COMPLETED, FAILED, HOW_TO_TELL, RUNNING
from espalier.settings.keys import changed
from espalier.settings.libraries import require_tracking
from espalier.settings.node import NodeSettings, simulated_node
from espalier.settings.registry import METHODS, part
from espalier.settings.run import parse
from espalier.storage.atomic import write_json
from espalier.storage.client_state import remove_run
from espalier.storage.peak_memory import highest_peak
from server_app.artifacts.outcome import Outcome
from server_app.estimate.record import record_peak
from server_app.estimate.start_summary import tell_plan, tell_time_of_sites
from server_app.model_fit import require_fit, require_sound_base
from server_app.public_tests import PublicTests, public_tests
from server_app.report.result_size import remove_set_aside, set_aside
from server_app.report.summary import Summary
from server_app.report.table import closing_line, show
from server_app.run_directory import model_before, open_run_directory
from server_app.tracking.run_tracking import RunTracking
from strategies.base.federation import Federation
from strategies.base.method import Method
from strategies.base.model_of_hub import with_downloaded_model
from strategies.base.progress import Clock
from strategies.base.rounds import RunFailed
from strategies.base.run import Run


def main(grid: Grid, context: Context) -> None:
    """Run the method that the settings name, and write its results."""
    ask_again_soon()
    try:
        run_method(grid, context, report=True)
    except (ExportError, EspalierError, RunFailed, OSError) as error:
        print(f"\nthe run failed: {error}\n{FLOWER_REPORTS_IT_TOO}", flush=True)
        # The message is for users, who need no traceback.
        raise error.with_traceback(None) from None


def run_method(
    grid: Grid, context: Context, clock: Clock | None = None, *, report: bool = False
) -> Path:
    """Run the method and return the run directory.

    ``clock`` is real time unless a test passes another one. With ``report`` the run ends with its
    ``report.html``, also if it failed after clients had enrolled.

    Raises
    ------
    InputError
        A setting, the model or an evaluation text is invalid. Nothing was started.
    RunFailed
        Too few clients completed their work.
    """
    simulation = is_simulation(grid)
    settings = parse(context.run_config, simulation=simulation, by_hand=changed(context.run_config))
    settings = settings.with_quorum(simulation=simulation)
    require_tracking(settings)
    require_reachable_epsilon(settings)
    grid = with_enough_nodes(grid, settings.num_clients)
    keys = public_keys(settings.site_keys) if settings.site_keys else None
    settings = with_downloaded_model(settings.model_copy(update={"model": model_before(settings)}))
    computing = set_up(settings, Path(settings.out_dir))
    with progress_listener(Throttle(lambda line: print(f"opening      {line}", flush=True))):
        model = open_model(settings.model)
        require_within_limits(settings, model)
        tests = public_tests(settings, model)
        require_fit(settings, model, tests, {}, simulation=simulation)
        require_sound_base(model, computing, tests)
    with open_run_directory(settings, model, str(context.run_id)) as directory:
        folder = directory.folder
        print(f"{RUN_DIRECTORY}{folder.path}", flush=True)
        tell_plan(settings, model, tests, computing, simulation=simulation, folder=folder.path)
        lineage = directory.lineage
        clock = clock or Clock()
        run = Run(settings, model, folder, lineage, grid, clock, simulation, computing, keys)
        losses: dict[str, dict[str, float | None]] = {name: {} for name in tests.texts}
        device = computing.device.type
        summary = Summary(settings, model, computing.threads, device, losses=losses)
        summary.samples_sha256 = tests.sha256(settings)
        try:
            _work_and_note_end(run, tests, summary)
        except Exception:
            # Before clients enrolled, there is nothing to show.
            if report and summary.roster.seats and folder.is_there():
                _write_report(folder.path)
            raise
        directory.note_completed()
        remove_set_aside(folder.path)
        if simulation:
            _remove_private_state(run)
        show(summary, folder.ledger.total())
        print(f"\n{summary.where}\n{closing_line(summary)}", flush=True)
        if report:
            _write_report(folder.path)
        return folder.path


def _work_and_note_end(run: Run, tests: PublicTests, summary: Summary) -> None:
    """Do the work of a run; ``summary.json`` has its status from the beginning to the end."""
    folder = run.folder
    tracking = RunTracking(run)
    summary.seconds = run.seconds_before
    summary.write(folder, RUNNING, HOW_TO_TELL, folder.ledger.total(), nobody_asked=True)
    try:
        with progress_listener(run.progress.report):
            _work(run, tests, summary)
        folder.require_there()
    except BaseException as error:
        # Without its directory the run cannot record its end.
        if isinstance(error, Exception) and not folder.is_there():
            raise InputError(_what_remains(run)) from None
        set_aside(folder.path)
        # If the disk is full, ``summary.json`` stays unchanged and says "running".
        with suppress(EspalierError):
            _note_end(run, summary, FAILED, f"{type(error).__name__}: {error}")
            tracking.finish(summary, completed=False)
        raise
    _note_end(run, summary, COMPLETED, None)
    tracking.finish(summary, completed=True)


def _write_report(folder: Path) -> None:
    """Write ``report.html``; an error is printed, and does not change how the run ended."""
    try:
        write_report(open_run(folder), folder / REPORT)
        print(f"the report is in {folder / REPORT}", flush=True)
    except Exception as error:
        print(f"no report could be written ({type(error).__name__}: {error})", flush=True)


def _what_remains(run: Run) -> str:
    """Return the error text for a run whose directory is gone.

    It lists what the run left elsewhere, and who removes it.
    """
    path = run.folder.path
    root = NodeSettings().state_root()
    gone = (
        "was removed or moved while the run was working; the run cannot continue, and can be"
        " resumed only if the directory is restored"
    )
    lines = [f"{path}: {gone}"]
    if path.exists():
        lines.append(f"what was written since is in a new directory of that name; remove {path}")
    if run.simulation:
        left = [root / run.lineage, *sorted((root / "egress").glob(f"{run.lineage}-*.jsonl"))]
        lines += [
            f"state of its clients remains in {place}; remove it"
            for place in left
            if place.exists()
        ]
    else:
        lines.append(
            "what remains: at each site the client state and the egress log of run"
            f" {run.lineage}, in its state-dir; the site removes the state after keep-days"
        )
    return "\n  ".join(lines)


def _note_end(run: Run, summary: Summary, status: str, reason: str | None) -> None:
    summary.seconds = run.seconds()
    # The record of memory does not change how a run ends.
    with suppress(EspalierError):
        clients = highest_peak(simulated_node().state_root(), run.lineage) if run.simulation else 0
        record_peak(run.folder.path, clients)
    run.folder.save_times(replace(run.folder.load_times(), run=summary.seconds))
    summary.write(run.folder, status, reason, run.folder.ledger.total())


def _work(run: Run, tests: PublicTests, summary: Summary) -> None:
    """Run rounds, export and evaluation.

    ``summary`` contains all finished steps, even if a later step fails.

    Raises
    ------
    ExportError
        The result was written and evaluated, but the reloaded model gives other logits.
    InputError
        The result was written and evaluated, but some numbers are NaN or infinite.
    """
    row = METHODS[run.settings.method]
    method: Method = part(row.strategy)(run, tests.evaluation(run))
    outcome: Outcome[Any] = part(row.outcome)(run, tests, summary)
    federation = Federation(
        method,
        (lambda clients: outcome.intermediate_metrics(method.result, clients))
        if row.measured_by_round
        else None,
        (lambda _: None)
        if run.simulation
        else partial(tell_time_of_sites, run.settings, run.model, tests),
    )
    try:
        federation.start()
    finally:
        summary.roster = run.rounds.roster
        summary.rounds = run.rounds.finished
        outcome.note_times(method.result)
        if run.simulation:
            _collect_egress_logs(run)
    if federation.measurements:
        write_json(run.folder.path / "rounds.json", {"rounds": federation.measurements})
    fault = None
    try:
        outcome.write(method.result)
    except ExportError as error:
        # The result is evaluated in spite of the fault and stays on disk. The run then ends as
        # "failed".
        fault = error
        run.progress.note(
            "export_fault",
            f"export       {error}; the result is evaluated nevertheless",
            reason=str(error),
        )
    outcome.measure(method.result)
    summary.take_figures(method.evaluation.figures, list(tests.texts), tests.metrics)
    outcome.take_clients_figures()
    summary.take_sizes(run.folder.path)
    if fault is not None:
        raise fault
    outcome.require_finite()


def _collect_egress_logs(run: Run) -> None:
    """Copy the egress logs of simulated sites, which are on this machine, to the run directory."""
    for log in sorted((NodeSettings().state_root() / "egress").glob(f"{run.lineage}-*.jsonl")):
        target = run.folder.path / "egress" / f"egress{log.name.removeprefix(run.lineage)}"
        target.parent.mkdir(exist_ok=True)
        shutil.copy(log, target)


def _remove_private_state(run: Run) -> None:
    """Delete the client state of a completed simulation; real sites keep theirs."""
    root = NodeSettings().state_root()
    remove_run(root, run.lineage)
    if (work := run.rounds.work) is not None:
        work.remove()
    for log in (root / "egress").glob(f"{run.lineage}-*.jsonl"):
        log.unlink(missing_ok=True)
