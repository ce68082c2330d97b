"""The pages about adding a method, a model family and a task work when they are followed.

A copy of the project gets the code of a page, and the page's commands run in it. The first line of
a block of code names its file, and the table that it belongs to or stands above.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    "adding-a-method", "adding-a-tuning-method", "adding-a-model-family", "adding-a-task",
]  # fmt: skip
COPIED = (
    "client_app", "espalier", "espalier_assets", "pruning_kernels", "server_app", "strategies",
    "tests", "pyproject.toml", "docs/reference/settings.md", "docs/privacy/index.md",
)  # fmt: skip


def blocks_of(page: Path) -> list[tuple[str, str]]:
    """Return language and content of each fenced block; commands have no language."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def defined(source: str) -> dict[str, tuple[int, int]]:
    """Return first and last line of each definition of a module, by name; lines count from 1."""
    found = {}
    for node in ast.parse(source).body:
        lines = (node.lineno, node.end_lineno or node.lineno)
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = lines
        if isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            found[ast.unparse(target)] = lines
    return found


def written(block: str, folder: Path) -> None:
    """Write a block of code into its file.

    A new file gets the whole block. In a file that exists, a definition of the same name is
    replaced; another block is added at the end, above a table, or as the first entry of a table.
    """
    first, _, code = block.partition("\n")
    match = re.fullmatch(r"# ([\w/.]+)(?:, (in|above) (\w+))?", first)
    assert match, first
    file = folder / match[1]
    if not file.exists():
        file.write_text(code)
        return
    lines = file.read_text().splitlines(keepends=True)
    own = defined(file.read_text())
    start = end = len(lines)
    if match[2]:
        start = end = own[match[3]][0] - (match[2] == "above")
    elif same := [own[name] for name in defined(code) if name in own]:
        ((start, end),) = same
        start -= 1
    lines[start:end] = [code, "\n\n" if match[2] == "above" else ""]
    file.write_text("".join(lines))


@pytest.mark.parametrize(
    "name", [PAGES[0], *(pytest.param(name, marks=pytest.mark.slow) for name in PAGES[1:])]
)
def test_a_page_works_when_it_is_followed(name: str, tmp_path: Path) -> None:
    page = ROOT / "docs" / "develop" / f"{name}.md"
    for path in COPIED:
        target = tmp_path / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / path).is_dir():
            shutil.copytree(ROOT / path, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / path, target)
    for language, block in blocks_of(page):
        if language == "python":
            written(block, tmp_path)
        else:
            told = run(block, tmp_path)
    assert re.search(r"[1-9]\d* passed", told)


def run(commands: str, folder: Path) -> str:
    """Run commands in a folder; return their output."""
    own = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": own, "PYTHONPATH": str(folder)}
    done = subprocess.run(
        ["bash", "-e", "-c", commands], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_short(name: str) -> None:
    # The page of a tuning method has three whole files.
    most = 75 if name == "adding-a-tuning-method" else 60
    assert len((ROOT / "docs" / "develop" / f"{name}.md").read_text().splitlines()) <= most


def test_the_smallest_method_is_small() -> None:
    folder = ROOT / "tests" / "toy_method"
    files = [folder / name for name in ("contract.py", "client.py", "strategy.py")]
    files.append(ROOT / "tests" / "methods" / "test_toy_method.py")
    assert sum(len(file.read_text().splitlines()) for file in files) <= 120


def test_the_modules_of_tasks_exist() -> None:
    page = (ROOT / "docs" / "develop" / "adding-a-task.md").read_text()
    (sentence,) = re.findall(r"It goes into the module of its kind in .*?\. ", page)
    named = set(re.findall(r"`(\w+\.py)`", sentence))
    assert len(named) == 4
    assert named < {file.name for file in (ROOT / "espalier/data/tasks/kinds").iterdir()}
