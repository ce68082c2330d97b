"""Runs from Python: ``espalier.simulate``, ``espalier.submit`` and ``espalier.load_result``.

The ``espalier`` command calls the same functions (``espalier.launch.run``). Importing this module
loads neither torch nor Flower.
"""

from contextlib import AbstractContextManager, nullcontext
from os import PathLike, fspath
from typing import TYPE_CHECKING, Unpack

from espalier.errors import RunError
from espalier.results.result import Result
from espalier.settings.reference.run_keywords import RunKeywords

if TYPE_CHECKING:
    from espalier.launch.run import WatchedRun
    from espalier.launch.run_output import Say

Path = str | PathLike[str]


def simulate(
    preset: Path | None = None,
    /,
    *,
    gpus_per_client: float = 0.0,
    app: Path | None = None,
    progress: bool = True,
    **settings: Unpack[RunKeywords],
) -> Result:
    """Simulate a federation on this machine, as ``espalier run``, and return its result.

    Parameters
    ----------
    preset : a preset of ``conf/``, or a TOML file such as ``settings.toml`` of an earlier run; None
        for the defaults
    gpus_per_client : fraction of a GPU for each simulated client
    app : a checkout of Espalier; None takes the current directory if it is one, else the installed
        app
    progress : whether the run's lines are written to standard output, in a notebook below the cell;
        in a terminal and in a notebook with a live view
    settings : settings that differ from the preset; a keyword is a settings key with ``_`` in place
        of each hyphen and dot, such as ``num_clients`` or ``lora_rank``

    Returns
    -------
    Result of the completed run.

    Raises
    ------
    InputError
        A setting, the model or the data cannot be used; nothing was started.
    RunError
        The run failed. Its text says why, and how to resume the run if that is possible.
    RunInterrupted
        The run was interrupted (Ctrl-C, or the notebook's stop button) and all its processes have
        ended; a KeyboardInterrupt that says how to resume it.
    """
    from espalier.launch import run
    from espalier.launch.app import find_app
    from espalier.launch.configuration import resolve
    from espalier.settings.reference.keywords import settings_from

    found = find_app(_text(app))
    given = settings_from(settings)
    config, parsed = resolve(found, _text(preset), given, on_this_machine=True)
    watched = _watched(preset, "simulate")
    with _output(parsed.method, progress) as watched.say:
        run.simulate(watched, found, config, parsed, gpus_per_client)
    return _result(watched)


def submit(
    preset: Path | None = None,
    /,
    *,
    superlink: str,
    root_certificates: Path | None = None,
    app: Path | None = None,
    progress: bool = True,
    **settings: Unpack[RunKeywords],
) -> Result:
    """Run on the sites that are connected to a SuperLink, and return the result at the end.

    An interrupt stops the run at the SuperLink. Relative paths among the settings are those of the
    SuperLink's machine. Further parameters and errors are those of ``simulate``.

    Parameters
    ----------
    superlink : ``host:port`` of the Control API of the SuperLink
    root_certificates : root certificates of that SuperLink; None: no TLS

    Returns
    -------
    Result, whose directory is on the SuperLink's machine. If that is another machine, copy the
    directory and call ``load_result``.
    """
    from espalier.launch import run
    from espalier.launch.addresses import require_address
    from espalier.launch.app import find_app
    from espalier.launch.configuration import resolve
    from espalier.settings.reference.keywords import settings_from

    require_address(superlink)
    found = find_app(_text(app))
    given = settings_from(settings)
    config, parsed = resolve(found, _text(preset), given, on_this_machine=False)
    watched = _watched(preset, "submit")
    with _output(parsed.method, progress) as watched.say:
        run.submit(watched, found, config, superlink, _text(root_certificates))
    return _result(watched)


def load_result(path: Path) -> Result:
    """Return the result of a run by its directory.

    Raises
    ------
    InputError
        The directory is not a run directory.
    """
    result = Result(fspath(path))
    # Reads the summary, so that a wrong path is an error here.
    result.summary  # noqa: B018
    return result


def _watched(preset: Path | None, function: str) -> "WatchedRun":
    from espalier.launch.run import WatchedRun

    first = "" if preset is None else f"{_text(preset)!r}, "

    def resuming(directory: str) -> str:
        return f"espalier.{function}({first}resume_from={directory!r}, ...)  # with equal settings"

    return WatchedRun("call the function again", resuming)


def _output(method: str, progress: bool) -> AbstractContextManager["Say"]:
    from espalier.launch.run_output import be_silent, run_output

    return run_output(method) if progress else nullcontext(be_silent)


def _result(watched: "WatchedRun") -> Result:
    if watched.path is None:
        raise RunError(
            ["the run is completed, but its log does not name the run directory; look in out-dir"],
            None,
        )
    return Result(watched.path)


def _text(path: Path | None) -> str | None:
    return None if path is None else fspath(path)
