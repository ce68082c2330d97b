"""Modules of the app in their own process: their code, their input and their end."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from espalier.launch.app import run_in_app

ROOT = Path(__file__).parents[2]


@pytest.fixture
def app(tmp_path: Path) -> Path:
    """Create an app with this copy of ``espalier`` and a module of its own."""
    (tmp_path / "espalier").symlink_to(ROOT / "espalier")
    return tmp_path


def test_app_s_module_runs_in_current_directory(
    app: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path_factory.mktemp("here")
    # This module must not be found, because it is not the app's.
    (here / "chosen.py").write_text("def main(document):\n    return 1\n")
    (app / "chosen.py").write_text(
        "from pathlib import Path\n\ndef main(document):\n   "
        " Path(document['file']).write_text('x')\n    return 7\n"
    )
    monkeypatch.chdir(here)
    assert run_in_app(app, "chosen", {"file": "written.txt"}) == 7
    assert (here / "written.txt").exists()


def test_module_ends_with_killed_command(app: Path, tmp_path: Path) -> None:
    """The command's process is killed; the module, which would run for a minute, ends too."""
    fifo = tmp_path / "alive"
    os.mkfifo(fifo)
    (app / "lasting.py").write_text(
        f"import time\n\ndef main(document):\n    with open({str(fifo)!r}, 'w') as pipe:\n       "
        " print('at work', file=pipe, flush=True)\n        time.sleep(60)\n        print('to the"
        " end', file=pipe)\n"
    )
    program = f"run_in_app(Path({str(app)!r}), 'lasting', 0)"
    imports = "from pathlib import Path; from espalier.launch.app import run_in_app; "
    command = subprocess.Popen([sys.executable, "-c", imports + program], cwd=ROOT)
    with open(fifo) as pipe:
        assert pipe.readline() == "at work\n"
        command.kill()
        command.wait()
        # The module wrote nothing more.
        assert pipe.read() == ""


def test_a_module_that_fails_says_so_by_its_code(
    app: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (app / "failing.py").write_text("def main(document):\n    raise ValueError(document)\n")
    assert run_in_app(app, "failing", "at the start") == 1
    assert "ValueError: at the start" in capfd.readouterr().err


def test_module_in_the_terminal_reads_standard_input(app: Path) -> None:
    """The document does not pass through standard input, which belongs to the module."""
    (app / "talking.py").write_text(
        "import sys\n\ndef main(document):\n    print(document['name'], input(), flush=True)\n"
        "    return len(sys.stdin.read())\n"
    )
    program = (
        "from pathlib import Path\nfrom espalier.launch.app import run_in_terminal\n"
        f"raise SystemExit(run_in_terminal(Path({str(app)!r}), 'talking', {{'name': 'x'}}))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        input="one line\nrest",
        env=environment,
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.returncode) == ("x one line\n", 4)


def test_lines_of_standard_error_are_heard(app: Path) -> None:
    (app / "complaining.py").write_text(
        "import sys\n\ndef main(document):\n    print('one\\ntwo', file=sys.stderr)\n    return 3\n"
    )
    lines: list[str] = []
    assert run_in_app(app, "complaining", {}, lines.append) == 3
    assert lines == ["one\n", "two\n"]


@pytest.mark.parametrize(
    ("ending", "code"), [("print('x' * 99999)", 1), ("raise KeyboardInterrupt", 130)]
)
def test_closed_output_and_interrupt_end_without_a_traceback(
    app: Path, ending: str, code: int
) -> None:
    (app / "chosen.py").write_text(f"def main(document):\n    {ending}\n    return 0\n")
    program = f"import sys; sys.exit(run_in_app(Path({str(app)!r}), 'chosen', 0))"
    imports = "from pathlib import Path; from espalier.launch.app import run_in_app; "
    reading, writing = os.pipe()
    os.close(reading)
    words = [sys.executable, "-c", imports + program]
    with os.fdopen(writing, "w") as closed:
        done = subprocess.run(words, cwd=ROOT, stdout=closed, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (code, b"")
