"""Rewrite the tables and plots of studies from their CSV files and conditions; no model is opened.

python -m benchmarks.reports docs/studies
"""

import argparse
import json
import sys
from pathlib import Path

from benchmarks.fedsoda import memory as fedsoda_memory
from benchmarks.fedsoda import report as fedsoda_report
from benchmarks.fedsoda import studies as fedsoda_studies
from benchmarks.fedspallm import studies as fedspallm_studies
from benchmarks.fedspine import regret as fedspine_regret
from benchmarks.fedspine import task_report as fedspine_task_report
from benchmarks.fedspine import task_study as fedspine_task_study
from benchmarks.fedspine.report import write_report as write_regret
from benchmarks.reporting import perplexity_report as fedspallm
from benchmarks.reporting import rows as by_columns
from benchmarks.sft_p import studies as sft_p_studies
from benchmarks.smaller import studies as smaller_studies
from benchmarks.smaller.times import write_times
from benchmarks.studies import report as fedprllm
from benchmarks.studies.rows import Rows
from benchmarks.tuning import report as tuning
from benchmarks.tuning import studies as tuning_studies
from espalier.errors import EspalierError


def write_again(csv: Path) -> bool:
    """Write the report of a study next to its CSV file.

    Returns
    -------
    bool
        False if the file belongs to no known study.

    Raises
    ------
    InputError
        The file or its conditions are damaged.
    """
    path = csv.with_suffix("")
    conditions = json.loads(csv.with_suffix(".json").read_text())
    family, _, name = csv.stem.partition("-")
    if csv.stem == "smaller-latency":
        times = smaller_studies.STUDIES[name]
        write_times(times.title, by_columns.Rows(csv, times.keys, times.figures, conditions), path)
    elif family in ("fedspallm", "smaller"):
        study = (fedspallm_studies if family == "fedspallm" else smaller_studies).STUDIES[name]
        fedspallm.write_report(
            study, by_columns.Rows(csv, study.keys, study.figures, conditions), conditions, path
        )
    elif family == "tuning":
        tuned = tuning_studies.STUDIES[name]
        rows = by_columns.Rows(csv, tuning_studies.KEYS, tuning_studies.FIGURES, conditions)
        tuning.write_report(tuned.title, tuned.tables, rows, conditions, path)
    elif (study_name := csv.stem.partition("-ties-")[0]) in fedprllm.TITLES:
        fedprllm.write_report(study_name, Rows(csv, conditions), path)
    elif (masked := csv.stem.removeprefix("sft-p-")) in sft_p_studies.STUDIES:
        variants = sft_p_studies.STUDIES[masked]
        fedspallm.write_report(
            variants,
            by_columns.Rows(csv, variants.keys, variants.figures, conditions),
            conditions,
            path,
        )
    elif csv.stem == "fedspine-regret":
        write_regret(
            by_columns.Rows(csv, fedspine_regret.KEYS, fedspine_regret.FIGURES, conditions), path
        )
    elif (
        family == "fedspine"
        and "metric" in conditions
        and not name.endswith(("-curves", "-devices"))
    ):
        found = fedspine_task_report.found_in(
            fedspine_task_study.files_of(path, conditions), conditions["metric"]
        )
        fedspine_task_report.write_report(
            fedspine_task_study.TITLE.format(name), found, conditions, path
        )
    elif csv.stem == "fedsoda-memory":
        fedsoda_memory.write_table(
            by_columns.Rows(csv, fedsoda_memory.KEYS, fedsoda_memory.FIGURES, conditions), path
        )
    elif family == "fedsoda" and name in fedsoda_studies.STUDIES:
        soda = fedsoda_studies.STUDIES[name]
        fedsoda_report.write_report(
            soda, by_columns.Rows(csv, soda.keys, soda.figures, conditions), conditions, path
        )
    else:
        return False
    return True


def main() -> int:
    """Rewrite all reports of a directory."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reports", description=__doc__)
    parser.add_argument("directory", type=Path)
    for csv in sorted(parser.parse_args().directory.glob("*.csv")):
        try:
            print(f"{csv.name}: {'written' if write_again(csv) else 'unchanged'}")
        except EspalierError as error:
            print(error, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
