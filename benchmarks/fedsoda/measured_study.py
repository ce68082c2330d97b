"""Command line of one measured study: data, conditions, rows and report."""

import argparse
from pathlib import Path

from benchmarks.fedsoda.cells import ALIGNING, COMMON
from benchmarks.fedsoda.report import write_report
from benchmarks.fedsoda.runs import Bench
from benchmarks.fedsoda.sources import make_sources
from benchmarks.fedsoda.studies import STUDIES, work
from benchmarks.reporting.rows import Rows
from benchmarks.study_command import chosen, model_conditions
from espalier.hf.machine.computing import set_up
from espalier.hf.opening.opened_model import open_model
from espalier.settings.run import parse
from espalier.storage.blobs import sha256


def measure(given: argparse.Namespace) -> None:
    """Measure missing rows of a study, and write its report."""
    study = STUDIES[given.command]
    changes = chosen(given.set)
    common = {
        **changes, "model": given.model, "threads": given.threads, "device": given.device,
        "task.name": given.task, "task.test-path": str(given.test),
    }  # fmt: skip
    plain = {
        key: value for key, value in {**COMMON, **common}.items() if not key.startswith("fedsoda.")
    }
    settings = parse(
        {**plain, "method": "fedpetuning", "data.source": "files", "data.path": str(given.data)}
    )
    model = open_model(settings.model)
    sources = make_sources(
        settings, given.data, given.public, given.work / "data", given.records, given.characters
    )
    data = {
        file.name: sha256(file.read_bytes())
        for file in (sources.clients, sources.in_domain, sources.out_of_domain)
    }
    inputs = {"model": model.sha256, "tests": sha256(sources.tested.read_bytes()), **data}
    conditions = {
        "model": model_conditions(model, "parameters"),
        "settings": {"task.name": given.task, **COMMON, **ALIGNING, **changes},
        "data": {"records": sources.clients.read_text(encoding="utf-8").count("\n"), **data},
        "threads": given.threads,
        "device": given.device,
    }
    bench = Bench(model, set_up(settings, Path()), common, sources, given.work / "results", inputs)
    path = given.out / f"fedsoda-{given.command}"
    rows = Rows(path.with_suffix(".csv"), study.keys, study.figures, conditions)
    work(study, bench, given.seeds, rows)
    write_report(study, rows, conditions, path)
