"""Records of published task files in the form that lm-evaluation-harness reads from the hub."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from espalier.data.tasks.kinds.classification import ENTAILMENTS
from espalier.errors import InputError

Json = dict[str, Any]
SPLITS = ("train", "validation", "validation_matched", "test", "dev")
"""Names under which task definitions ask for data; a local file is all of them."""


def _arc(record: Json) -> Json:
    if not isinstance(record["question"], dict):
        return record
    # The published file has a list of choices, the hub's has a list for each field.
    choices = record["question"]["choices"]
    columns = {name: [choice[name] for choice in choices] for name in ("text", "label")}
    return {
        "question": record["question"]["stem"],
        "choices": columns,
        "answerKey": record["answerKey"],
    }


def _mnli(record: Json) -> Json:
    label = record["label"]
    return record | {"label": ENTAILMENTS.index(label) if isinstance(label, str) else label}


def _boolq(record: Json) -> Json:
    label = record["label"] if "label" in record else record["answer"]
    return {"passage": record["passage"], "question": record["question"], "label": int(label)}


def _hellaswag(record: Json) -> Json:
    # The published file has the context in one piece.
    whole = {"ctx_a": record["ctx"], "ctx_b": ""} if "ctx_a" not in record else {}
    return record | whole | {"label": str(record["label"])}


IN_THE_HUBS_FORM: dict[str, Callable[[Json], Json]] = {
    "arc_easy": _arc, "arc_challenge": _arc, "mnli": _mnli, "boolq": _boolq,
    "hellaswag": _hellaswag,
}  # fmt: skip
"""Conversion of a record by the harness's name of a task; other tasks take records as they are."""


def with_local_data(task: Json, name: str, file: Path, folder: Path) -> Json:
    """Return a task definition of the harness that reads a local file and no hub.

    Raises InputError if the file cannot be read, or a record lacks a field.

    Parameters
    ----------
    task : the definition, as its YAML file has it
    name : the harness's name of the task
    file : JSON Lines, one record per item
    folder : folder for the converted records and the cache of datasets
    """
    converted = folder / f"{name}.jsonl"
    convert = IN_THE_HUBS_FORM.get(name, dict)
    number = 0
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
        with open(converted, "w", encoding="utf-8") as target:
            for line in lines:
                number += 1
                if line.strip():
                    target.write(json.dumps(convert(json.loads(line))) + "\n")
    except OSError as error:
        raise InputError(f"--data {name}={file}: cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"--data {name}={file}: line {number} is no record of the task"
            f" ({type(error).__name__}: {error}); give JSON Lines with the fields of the dataset"
        ) from None
    files = {split: str(converted) for split in SPLITS}
    data = {"data_files": files, "cache_dir": str(folder / "cache")}
    return task | {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": data}
