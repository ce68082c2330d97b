"""Reports in a real browser: nothing is cut off or wider than the window.

Needs Chromium (``chromium``, ``chromium-browser`` or ``google-chrome`` in the path).
"""

import json
import shutil
import subprocess
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from espalier.results.comparison.command import main as compare
from espalier.results.report.command import main as report
from tests.bench import EVALUATED, Bench, home
from tests.results.run_directories import metric, save_run
from tests.results.test_run_report import TUNED

PROGRAM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROGRAM is None, reason="needs Chromium"),
]
PHONE = 390
"""Width of a phone in CSS pixels."""
MEASURE = """
<iframe id="page" width="{width}" height="900" srcdoc="{page}"></iframe>
<script>
addEventListener("load", () => {{
  const view = document.getElementById("page").contentDocument;
  // What lies in an element that scrolls may be wider than the window.
  const scrolls = element => element && (
    getComputedStyle(element).overflowX === "auto" || scrolls(element.parentElement));
  const outside = [...view.body.querySelectorAll("*")].filter(
    element => !scrolls(element) && element.getBoundingClientRect().right > {width});
  document.title = JSON.stringify({{
    "width": view.documentElement.scrollWidth,
    "outside": outside.map(element => element.outerHTML.slice(0, 80)),
    "drawn": [...view.querySelectorAll("body svg")].map(
      element => element.getBoundingClientRect().width),
  }});
}});
</script>
"""


class Title(HTMLParser):
    """Text of the last title of a page."""

    text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.inside = tag == "title"

    def handle_data(self, data: str) -> None:
        if getattr(self, "inside", False):
            self.text = data

    def handle_endtag(self, tag: str) -> None:
        self.inside = False


def seen(page: Path, width: int, folder: Path) -> dict[str, Any]:
    """Return the measures of a page in a window of ``width`` CSS pixels."""
    frame = folder / "frame.html"
    text = page.read_text(encoding="utf-8")
    frame.write_text(MEASURE.format(width=width, page=escape(text)), encoding="utf-8")
    assert PROGRAM is not None
    command = [
        PROGRAM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--no-first-run", "--disable-background-networking", "--disable-component-update",
        "--disable-sync", f"--user-data-dir={folder / 'browser'}", "--window-size=1400,1000",
        "--virtual-time-budget=5000", "--dump-dom", frame.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    title = Title()
    title.feed(done.stdout)
    found: dict[str, Any] = json.loads(title.text)
    return found


def assert_fits(page: Path, width: int, folder: Path) -> None:
    found = seen(page, width, folder)
    assert found["outside"] == []
    assert found["width"] <= width
    assert found["drawn"]
    assert all(0 < drawn <= width for drawn in found["drawn"])


@pytest.mark.parametrize("width", [PHONE, 1280])
@pytest.mark.parametrize("method", ["fedprllm", "fedpetuning", "sft-p"])
def test_report_fits_the_window(
    tmp_path: Path, method: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ESPALIER_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setattr("espalier.data.client_text.MIN_PREDICTIONS", 3)
    tuned = {} if method == "fedprllm" else TUNED
    bench = Bench(tmp_path, method, EVALUATED | tuned, num_clients=3, home=home(tmp_path / "home"))
    folder = bench.run()
    assert report({"directories": [str(folder)], "out": None, "measure": False, "base": None}) == 0
    assert_fits(folder / "report.html", width, tmp_path)


@pytest.mark.parametrize("width", [PHONE, 1280])
def test_comparison_fits_the_window(tmp_path: Path, width: int) -> None:
    for name, value in (("a", 11.0), ("b", 12.0)):
        save_run(tmp_path / "runs" / name, metrics=[metric("wiki", value)])
    page = tmp_path / "compared.html"
    document = {"runs": [str(tmp_path / "runs")], "out": [str(page)], "metric": "", "against": ""}
    assert compare(document) == 0
    assert_fits(page, width, tmp_path)
