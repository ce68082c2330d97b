"""References in the README, CONTRIBUTING.md and docs/ exist.

They are pages, sections, settings, files, functions and commands.
"""

import ast
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from markdown import markdown
from markdown_it import MarkdownIt

from espalier.launch.presets import preset_files
from espalier.messages.sums.secure_sum import KINDS as SECURE_KINDS
from espalier.methods.examples import KINDS, is_sent
from espalier.methods.privacy_table import privacy_table
from espalier.settings.node import NodeSettings
from espalier.settings.registry import METHODS, settings_of
from tests.pages.method_pages import page_of
from tests.pages.schema import keys_of, keys_of_a_run, tables_of_a_run

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(set((ROOT / "docs").rglob("*.md")) - set((ROOT / "docs" / "studies").iterdir())),
]
"""All pages but those of docs/studies, which the studies write."""
DOCS = [page for page in PAGES if page.is_relative_to(ROOT / "docs")]
WRITTEN = [page for page in PAGES if page.name != "settings.md"]
"""Pages that are written by hand."""
METHOD_PAGES = [page for page in PAGES if page.is_relative_to(ROOT / "docs" / "methods")]


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def text_of(page: Path) -> str:
    """Return a page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


@cache
def sections_of(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", text_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        if target.startswith(("https://", "http://")):
            continue
        path, _, section = target.partition("#")
        other = (page.parent / path).resolve() if path else page
        assert other.exists(), target
        assert not section or section in sections_of(other), target


@pytest.mark.parametrize("page", DOCS, ids=named)
def test_page_begins_with_what_its_reader_can_do(page: Path) -> None:
    title, _, first, *_ = page.read_text().splitlines()
    assert title.startswith("# ")
    assert first.startswith("After reading this page ")


@pytest.mark.parametrize("page", DOCS, ids=named)
def test_page_has_the_same_lists_on_github(page: Path) -> None:
    """MkDocs, unlike GitHub, nests a line only if it is indented by four spaces."""
    github = MarkdownIt("commonmark").enable("table").render(page.read_text())
    site = markdown(page.read_text(), extensions=["tables", "fenced_code", "sane_lists"])
    for tag in ("li", "ul", "ol", "tr", "pre", "h2", "h3"):
        assert github.count(f"<{tag}>") == site.count(f"<{tag}>"), tag


@pytest.mark.parametrize("page", WRITTEN, ids=named)
def test_settings_it_names_exist(page: Path) -> None:
    """The check covers ``table.key`` of existing tables, in text and in commands."""
    known = {key.dotted for key in keys_of_a_run()}
    tables = "|".join(filter(None, tables_of_a_run()))
    found = re.findall(
        rf"(?<![\w./-])(?:{tables})\.[a-z][a-z0-9-]*(?![\w(/-])(?!\.[a-z])", page.read_text()
    )
    assert {
        name for name in found if not name.endswith((".py", ".md", ".toml", ".jsonl", ".txt"))
    } <= known


def test_the_keys_of_the_site_policy_exist() -> None:
    known = {key.name for key in keys_of(NodeSettings)}
    section = (
        (ROOT / "docs" / "privacy" / "reference.md")
        .read_text()
        .split("## Site policy")[1]
        .split("\n## ")[0]
    )
    rows = re.findall(r"^\| (`[^|]+) \|", section, re.MULTILINE)
    names = [name for row in rows for name in re.findall(r"`([a-z-]+)`", row)]
    assert len(names) > 10
    assert set(names) <= known


@pytest.mark.parametrize("page", WRITTEN, ids=named)
def test_commands_of_its_own_exist(page: Path) -> None:
    """The check covers ``python -m module``, ``python file``, ``pytest file`` and presets."""
    text = page.read_text()
    for module in re.findall(r"python -m ((?:espalier|espalier_assets|benchmarks)[\w.]*)", text):
        assert find_spec(module) is not None, module
    for file in re.findall(r"(?:python|pytest) (?:-n 0 )?((?:benchmarks|tests)/[\w/.]+)", text):
        # A page may contain the file that its command names.
        assert (ROOT / file).exists() or f"# {file}\n" in text, file
    for preset in re.findall(r"espalier run ([a-z][a-z0-9.-]*)(?=[\s`])", text):
        assert preset in preset_files(ROOT)


# ----- methods ------------------------------------------------------------------------------------


@cache
def defined_in(file: Path) -> set[str]:
    """Return the functions and classes of a file, and its methods as ``Class.method``."""
    found = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {
                f"{node.name}.{inner.name}"
                for inner in node.body
                if isinstance(inner, ast.FunctionDef)
            }
    return found


@pytest.mark.parametrize("page", METHOD_PAGES, ids=named)
def test_files_and_functions_named_by_pages_exist(page: Path) -> None:
    """The names that follow a file in `` `file.py`, `function` `` are defined in it."""
    file: Path | None = None
    for name in re.findall(
        r"`([\w/.]+)`", "\n".join(line for line in text_of(page).splitlines() if ".py`" in line)
    ):
        if name.endswith(".py"):
            file = ROOT / name
            assert file.exists(), name
        elif file is not None and re.fullmatch(r"[A-Z]\w*(\.\w+)?|[a-z]+(_[a-z]+)+", name):
            assert name in defined_in(file), (file.name, name)


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_paths_of_files_exist(page: Path) -> None:
    """Pages that show how to add something contain the files that they name."""
    for path in re.findall(r"`((?:[a-z_]+/)+\w+\.py)`", text_of(page)):
        whole = ROOT / path
        elsewhere = not (ROOT / path.split("/")[0]).exists()
        assert whole.exists() or page.name.startswith("adding-") or elsewhere, path


def test_api_pages_name_what_exists() -> None:
    pages = (ROOT / "docs" / "reference" / "api").glob("*.md")
    names = [name for page in pages for name in re.findall(r"^::: (\S+)", page.read_text(), re.M)]
    assert len(names) > 20
    for name in names:
        module, _, item = name.rpartition(".")
        file = ROOT / f"{module.replace('.', '/')}.py"
        assert item in defined_in(file) if file.exists() else find_spec(name) is not None, name


CARD = [
    "The idea",
    "What leaves a site",
    "When to use it",
    "Settings",
    "Differences from the paper",
    "What our studies found",
]
"""First sections of the page of a method, in their order."""


@pytest.mark.parametrize("method", METHODS)
def test_method_page_is_a_card_with_links(
    method: str,
) -> None:
    text = (ROOT / "docs" / "methods" / page_of(method)).read_text()
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert headings[: len(CARD)] == CARD
    assert "From the paper to the code" in headings
    assert f"espalier run {method}\n" in text
    assert f"(../../reference/settings.md#{method})" in text
    assert f"(../../findings/{page_of(method)}" in text


# ----- privacy ------------------------------------------------------------------------------------


def test_privacy_table_follows_from_contracts() -> None:
    """Run ``python -m espalier.methods.privacy_table`` to update the table."""
    assert f"\n\n{privacy_table()}\n" in (ROOT / "docs" / "privacy" / "reference.md").read_text()


def test_data_protection_page_fits_two_pages() -> None:
    assert len((ROOT / "docs" / "privacy" / "index.md").read_text().split()) <= 900


def test_data_protection_page_names_each_method() -> None:
    text = (ROOT / "docs" / "privacy" / "index.md").read_text().lower()
    for row in METHODS.values():
        assert row.title.split(" (")[0].lower() in text, row.title


def test_privacy_table_has_each_method_once() -> None:
    """No two rows of one kind are equal.

    Methods whose rounds leave a local baseline have no ``local_baseline`` request. Methods whose
    replies are one blob have no ``fetch``.
    """
    rows = [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for line in privacy_table().splitlines()[2:-1]
    ]
    assert len({(kind, leaves, learns) for kind, _, leaves, learns in rows}) == len(rows)
    for kind in KINDS:
        of_kind = [row for row in rows if row[0] == kind or row[0].startswith(f"{kind} of round ")]
        methods = {
            name for row in of_kind for name in (METHODS if row[1] == "all" else row[1].split(", "))
        }
        jobs = {
            method: settings_of(method)
            for method in METHODS
            if kind not in ("fetch", *SECURE_KINDS) or is_sent(method, kind)
        }
        expected = {
            method
            for method, job in jobs.items()
            if kind != "local_baseline" or job.MAKES_LOCAL_BASELINE_WITH or job().has_local_baseline
        }
        assert {name.strip("`") for name in methods} == expected
        assert expected >= ({"pooled-pruning"} if kind in SECURE_KINDS else {"fedpetuning"})
