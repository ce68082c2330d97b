"""Commands that look at finished runs: ``runs`` and ``compare``."""

from espalier.cli import Commands
from espalier.launch.app import calls

AGAINST = ("parameters", "disk", "bytes", "seconds")
"""Values that a plot can have on its horizontal axis."""


def add_runs(commands: Commands) -> None:
    """Add ``espalier runs`` to the parser."""
    parser = commands.add_parser(
        "runs", help="list runs: running, interrupted, failed or completed, and their main figures"
    )
    parser.add_argument(
        "directories",
        nargs="*",
        default=["runs"],
        metavar="DIRECTORY",
        help="run directory, or a directory with runs; default: runs",
    )
    parser.add_argument("--json", action="store_true", help="print JSON with all values")
    parser.set_defaults(execute=calls("espalier.results.run_list", "directories", "json"))


def add_compare(commands: Commands) -> None:
    """Add ``espalier compare`` to the parser."""
    parser = commands.add_parser(
        "compare", help="compare quality, size and cost of runs that have the same base model"
    )
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="run directory, or a directory whose runs are compared",
    )
    parser.add_argument(
        "--out",
        action="append",
        default=[],
        metavar="FILE",
        help="write the comparison too: .html, .md, .csv, or .png and .svg for the plot alone",
    )
    parser.add_argument(
        "--metric",
        default="",
        metavar="NAME",
        help="quality in the plot, such as 'wiki' or 'wiki perplexity'; default: the main figure",
    )
    parser.add_argument(
        "--against",
        default="",
        choices=AGAINST,
        help="cost in the plot; default: parameters if the results differ in size, else bytes sent",
    )
    options = ("runs", "out", "metric", "against")
    parser.set_defaults(execute=calls("espalier.results.comparison.command", *options))
