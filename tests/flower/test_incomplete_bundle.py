"""Runs whose program was installed only in part.

Such a run is recognized and submitted again with a bundle of its own.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from flwr.cli.build import build_fab_from_disk

from espalier.cli.command import main
from espalier.errors import FLOWER_REPORTS_IT_TOO
from espalier.flower.load_faults import is_incomplete, load_remedy, unshared_app, where_to_mend
from espalier.identity.code_hash import bundle_sha256

APP = Path(__file__).parent.parent.parent
FOLDER = "/home/ann/.flwr/apps/espalier.espalier.0.1.0.7230a616"
FAULTS = [
    f"FileNotFoundError: Cannot find pyproject.toml in {FOLDER}",
    "flwr.server.run_serverapp.LoadServerAppError: Unable to load module server_app.entry_point",
    (
        "flwr.clientapp.client_app.LoadClientAppError: Unable to load attribute app from module"
        " client_app.app"
    ),
    "ModuleNotFoundError: No module named 'strategies'",
    "ModuleNotFoundError: No module named 'espalier.models.plan'",
    (
        "ImportError: cannot import name 'parse' from 'espalier.settings.run'"
        f" ({FOLDER}/espalier/settings/run.py)"
    ),
    (
        f"  File \"{FOLDER}/server_app/app.py\", line 9\n    x = (\n        ^\nSyntaxError: '(' was"
        " never closed"
    ),
    # A pyproject.toml that is empty, or ends too early.
    "ValueError: Invalid pyproject.toml:\n  - Missing [project] section",
    "tomli._parser.TOMLDecodeError: Unterminated string (at end of document)",
    f"RunFailed: 0 clients enrolled\n  node 3: Flower reports error 1; the node {load_remedy()}",
]
OTHERS = [
    "",
    "the run failed: too few clients",
    "ModuleNotFoundError: No module named 'bitsandbytes'",
    "FileNotFoundError: [Errno 2] No such file or directory: '/models/llama/config.json'",
    "ImportError: cannot import name 'x' from 'transformers'",
    "ValueError: SyntaxError: of something else",
    "the run failed: fleet.toml: TOMLDecodeError: Unterminated string",
]


@pytest.mark.parametrize("log", FAULTS)
def test_partial_program_is_recognised(log: str) -> None:
    assert is_incomplete(f"starting\n{log}\nmore\n")


@pytest.mark.parametrize("log", OTHERS)
def test_other_failures_are_not(log: str) -> None:
    assert not is_incomplete(f"starting\n{log}\nmore\n")


def test_directory_to_remove_is_read_from_log() -> None:
    assert where_to_mend(FAULTS[0]) == FOLDER
    assert where_to_mend(FAULTS[5]) == FOLDER
    assert where_to_mend(FAULTS[1]).startswith("apps/espalier.espalier.* in the FLWR_HOME")


def test_another_bundle_holds_the_same_program(tmp_path: Path) -> None:
    """Sites compare hashes of programs; Flower names directories by hashes of bundles."""
    copies = [unshared_app(APP, tmp_path), unshared_app(APP, tmp_path)]
    bundles = [build_fab_from_disk(app) for app in (APP, *copies)]
    assert len({hashlib.sha256(bundle).hexdigest()[:8] for bundle in bundles}) == 3
    assert len({bundle_sha256(bundle) for bundle in bundles}) == 1


class Shared:
    """Shared SuperLink whose runs end as given."""

    process = None

    def __init__(self, folder: Path, ends: list[tuple[str, str]]) -> None:
        self.folder = folder
        self.ends = ends
        self.apps: list[Path] = []

    def start_run(self, app: Path, *_: object) -> str:
        self.apps.append(app)
        return str(len(self.apps))

    def stream_log(self, run_id: str) -> Iterator[str]:
        yield from self.ends[int(run_id) - 1][1].splitlines(keepends=True)

    def status(self, run_id: str) -> tuple[str, str]:
        return self.ends[int(run_id) - 1][0], "details"


@pytest.fixture
def give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, list[Path]]]:
    """Return a function that runs the command on a shared SuperLink.

    Its arguments are the ends of the runs. It returns the exit code and the submitted apps.
    """

    def run(*ends: tuple[str, str]) -> tuple[int, list[Path]]:
        superlink = Shared(tmp_path, list(ends))

        @contextmanager
        def opened(*_: object) -> Iterator[Shared]:
            yield superlink

        monkeypatch.setattr("espalier.launch.run.running_superlink", opened)
        return main(["run", "two-sites", "--app", str(APP), "--superlink", "h:1"]), superlink.apps

    return run


HALF = ("finished:failed", f"{FAULTS[0]}\n")


def test_partial_program_leads_to_second_try(
    give: Callable[..., tuple[int, list[Path]]], capsys: pytest.CaptureFixture[str]
) -> None:
    code, apps = give(HALF, ("finished:completed", "fine\n"))
    assert code == 0
    assert apps[0] == APP != apps[1]
    assert FOLDER in capsys.readouterr().err


@pytest.mark.parametrize(
    "line", [f"the node {load_remedy()}\n{FLOWER_REPORTS_IT_TOO}\n", f"{FAULTS[3]}\n"]
)
def test_so_is_one_whose_nodes_could_not_load_it(
    give: Callable[..., tuple[int, list[Path]]], line: str
) -> None:
    assert give(("finished:failed", line), ("finished:completed", ""))[0] == 0


def test_it_is_submitted_once_more_only(give: Callable[..., tuple[int, list[Path]]]) -> None:
    code, apps = give(HALF, HALF)
    assert (code, len(apps)) == (1, 2)


def test_other_endings_are_not_repeated(
    give: Callable[..., tuple[int, list[Path]]],
) -> None:
    assert len(give(("finished:failed", "the run failed\n"))[1]) == 1
    assert len(give(("finished:completed", f"refused      {FAULTS[-1]}\n"))[1]) == 1
    assert len(give(("finished:stopped", "fine\n"))[1]) == 1
