"""Studies of pooled pruning, and of masks in general, on your own model and texts.

    python -m benchmarks.pooled exact --model DIRECTORY --private FILE --private FILE
    python -m benchmarks.pooled quality --model DIRECTORY --private FILE --private FILE --private
    FILE --text NAME=FILE --text NAME=FILE
    python -m benchmarks.pooled claims ...

Every private file belongs to one client. ``exact`` compares masks bit by bit with those of plain
transformers (a table on the screen and in ``--out``). ``quality`` runs the app for every method and
sparsity, ``claims`` for what the papers of FedPrLLM and FedSpaLLM compare. Their runs are kept in
``--work``, so that an interrupted study continues there. Results go to
``docs/studies/pooled-quality.csv`` or ``mask-claims.csv`` row by row, and finally to Markdown
tables and a plot next to it.
"""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

import torch

from benchmarks.pooled.claims import STUDY as CLAIMS
from benchmarks.pooled.exact import Finding, iterative, one_shot
from benchmarks.pooled.quality import METHODS, study
from benchmarks.reporting.perplexity_report import write_report
from benchmarks.smaller.bench import add_arguments, measure
from benchmarks.study_command import exit_status, new_parser
from espalier.errors import InputError
from espalier.hf.opening.opened_model import open_model
from espalier.storage.atomic import write_bytes

SEQUENTIAL = (("wanda", "row"), ("ria", "2:4"))
"""Metric and group of the iterative comparisons, each of which passes the model once per block."""


def _arguments() -> argparse.Namespace:
    parser = new_parser("benchmarks.pooled", __doc__)
    studies = parser.add_subparsers(dest="study", required=True)
    exact = studies.add_parser("exact", help="compare masks bit by bit")
    exact.add_argument("--model", required=True, help="directory of a Hugging Face model")
    exact.add_argument(
        "--private", required=True, action="append", type=Path, help="the text of one client"
    )
    exact.add_argument("--samples", type=int, default=8, help="calibration samples per client")
    exact.add_argument("--sequence-length", type=int, default=256)
    exact.add_argument("--iterative", action="store_true", help="compare block by block, too")
    exact.add_argument("--threads", type=int, default=1)
    exact.add_argument("--out", type=Path, default=Path("docs/studies"))
    quality = studies.add_parser("quality", help="run the app")
    quality.add_argument(
        "--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="NAME",
        help="methods to run: " + "; ".join(METHODS),
    )  # fmt: skip
    add_arguments(quality, work="runs/pooled", threads=2)
    claims = studies.add_parser("claims", help="run the app with what two papers compare")
    add_arguments(claims, work="runs/claims", threads=2)
    return parser.parse_args()


def samples_of(encode: object, file: Path, samples: int, length: int) -> torch.Tensor:
    """Return the first samples of a text, (samples, length), int64.

    Raises
    ------
    InputError
        The file cannot be read or is too short.
    """
    try:
        tokens = encode(file.read_text(encoding="utf-8"))  # type: ignore[operator]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--private {file}: cannot be read ({error})") from None
    if len(tokens) < samples * length:
        raise InputError(
            f"--private {file}: has {len(tokens)} tokens, {samples} samples of {length} are needed;"
            " name a longer text or lower --samples"
        )
    return torch.as_tensor(tokens[: samples * length]).view(samples, length)


def table(findings: Iterable[Finding]) -> list[str]:
    """Return the rows of a Markdown table."""
    lines = [
        "| strategy | metric | group | weighting | mask bits | differing | samples one by one |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in findings:
        case = one.case
        other = "" if one.differing_one_by_one is None else f"{one.differing_one_by_one:,}"
        lines.append(
            f"| {case.strategy} | {case.metric} | {case.group} | {case.weighting} | {one.bits:,} |"
            f" {one.differing:,} | {other} |"
        )
        print(lines[-1], flush=True)
    return lines


def _exact(given: argparse.Namespace) -> None:
    torch.set_num_threads(given.threads)
    model = open_model(given.model)
    clients = [
        samples_of(model.encode, file, given.samples, given.sequence_length)
        for file in given.private
    ]
    lines = table(one_shot(model.directory, clients))
    if given.iterative:
        lines += table(iterative(model.directory, clients, SEQUENTIAL))[2:]
    page = [
        "# Masks of pooled pruning, bit by bit",
        "",
        f"Model `{model.directory.name}`, {len(clients)} clients with {given.samples} samples of"
        f" {given.sequence_length} tokens each, 50% or 2:4. Masks from sums in fixed point,"
        " compared with masks from float64 sums of plain transformers' hooks: over the same"
        " batches, and with samples one by one (the forward pass rounds differently there).",
        "",
        *lines,
        "",
    ]
    path = given.out / f"pooled-exact-{model.directory.name}.md"
    write_bytes(path, "\n".join(page).encode())
    print(f"written      {path}")


def _runs(given: argparse.Namespace) -> None:
    if given.study == "quality":
        path, chosen = given.out / "pooled-quality", study(given.methods)
    else:
        path, chosen = given.out / "mask-claims", CLAIMS
    settings = {"data.sequence-length": given.sequence_length}
    rows, conditions = measure(given, chosen, path, settings, {})
    write_report(chosen, rows, conditions, path)


def main() -> int:
    """Run a study, or its missing parts; return 2 after an error."""
    given = _arguments()
    return exit_status(lambda: _exact(given) if given.study == "exact" else _runs(given))


if __name__ == "__main__":
    sys.exit(main())
