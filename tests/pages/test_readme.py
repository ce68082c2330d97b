"""README: its length, and agreement with the code."""

import itertools
import re
import shlex
from pathlib import Path

import pytest
import yaml

from espalier.settings.registry import METHODS
from tests.pages.method_pages import page_of

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
SHOWN = re.sub(r"\]\([^)]*\)", "]", README)
"""Text that a reader sees: links without their targets."""
ROWS = {
    row[-2].strip().strip("`"): row
    for row in (line.split("|")[:-1] for line in README.splitlines())
    if len(row) == 6
}
"""Rows of the table of methods, by preset."""


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 150
    assert len(SHOWN) <= 9_600


def test_every_paper_of_the_methods_can_be_cited() -> None:
    papers = re.findall(r"https://(?:arxiv\.org|openreview\.net)[^)]*", README)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert len(papers) > 10
    assert set(papers) <= {reference["url"] for reference in citation["references"]}


def test_it_has_the_two_commands() -> None:
    assert "pip install -c constraints.txt -e . && espalier run\n" in README
    assert "flwr run . --stream" in README
    assert "pip install -c constraints.txt -e '.[dev]' && pytest -n 3" in README


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_a_row_with_links(method: str) -> None:
    _, _, paper, leaves, _, page = ROWS[method]
    assert re.search(r"\(https://(arxiv\.org/abs/|openreview\.net/forum\?id=)", paper)
    assert leaves.strip()
    assert f"(docs/methods/{page_of(method)})" in page
    assert (ROOT / "conf" / f"{method}.toml").exists()


def test_superlink_command_is_closed_and_durable() -> None:
    """The other commands connect to the addresses at which it listens."""
    (line,) = [line for line in README.splitlines() if line.startswith("flower-superlink")]
    words = shlex.split(line)
    given = dict(itertools.pairwise(words))
    assert given["--host"] == "127.0.0.1"
    assert given["--fleet-api-address"].startswith("127.0.0.1:")
    assert "--disable-runtime-dependency-installation" in words
    assert given["--database"].endswith(".db")
    nodes = [
        shlex.split(line) for line in README.splitlines() if line.startswith("flower-supernode")
    ]
    assert {words[words.index("--superlink") + 1] for words in nodes} == {
        given["--fleet-api-address"]
    }
    assert f"espalier run two-sites --superlink 127.0.0.1:{given['--port']}\n" in README


def test_all_that_it_draws_is_there() -> None:
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", README)
    assert len(pictures) == 2
    assert all((ROOT / picture).exists() for picture in pictures)
