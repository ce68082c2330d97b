"""Comparison of our task scores with lm-evaluation-harness, item by item, without a network.

    pip install -e '.[lm-eval]'
    python -m benchmarks.accuracy.lm_eval_agreement --model MODEL sst2=sst2_dev.jsonl
    arc-easy=arc_easy_dev.jsonl gsm8k=gsm8k_test.jsonl

The harness runs its own task definitions on the same records, in the format of the Hugging Face
hub. On our side, items are encoded like a run's public test items and scored like its models. The
comparison covers the strings that go to the model, the log-likelihood of every option, each item's
prediction, the accuracies, and the generated answers of gsm8k. A file of mmlu has one subject,
because the harness has a task for each. The harness has no tasks for dolly and alpaca.
"""

import argparse
import json
import os
import tempfile
from importlib import import_module
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")

import torch

from espalier.data.client_items import as_tests
from espalier.data.tasks.catalogue import task_named
from espalier.data.tasks.item import Item
from espalier.data.tasks.scored_items import ScoredItems
from espalier.data.tasks.task import Generation
from espalier.data.tasks.task_source import items_in
from espalier.evaluation.exact_match import exact_match, found_answers, generate
from espalier.evaluation.scores import log_likelihoods, score
from espalier.results.use.harness_records import with_local_data
from espalier.settings.run import parse

Json = dict[str, Any]
BATCH = 16


def harness_samples(
    model: Any, tokenizer: Any, name: str, records: list[Json], max_tokens: int, folder: Path
) -> list[Json]:
    """Return the harness's log of each item, in order.

    With several filters, each item has one entry per filter.
    """
    harness = import_module("lm_eval")
    models = import_module("lm_eval.models.huggingface")
    named = f"mmlu_{records[0]['subject']}" if name == "mmlu" else name.replace("-", "_")
    file = folder / f"{named}-records.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    known = import_module("lm_eval.tasks").TaskManager().task_index[named]
    task = import_module("lm_eval.tasks._yaml_loader").load_yaml(known.yaml_path, resolve_func=True)
    task = with_local_data(task, named, file, folder) | {"num_fewshot": 0}
    done = harness.simple_evaluate(
        model=models.HFLM(
            pretrained=model, tokenizer=tokenizer, max_length=max_tokens, batch_size=8, device="cpu"
        ),
        tasks=[task],
        bootstrap_iters=0,
        log_samples=True,
    )
    (samples,) = done["samples"].values()
    return sorted(samples, key=lambda sample: sample["doc_id"])


def as_a_run_has_them(tokenizer: Any, name: str, items: list[Item], max_tokens: int) -> ScoredItems:
    """Return items as token ids, encoded like a run's public test items.

    ``max_tokens`` is the context length of the language model.
    """
    settings = parse(
        {"method": "fedpetuning", "task.name": name, "data.source": "files", "data.path": "unused"}
    )
    decoder = SimpleNamespace(kind="decoder")
    model = SimpleNamespace(tokenizer=tokenizer, family=decoder, num_positions=max_tokens)
    return as_tests(settings, items, model)


def compare_options(
    model: Any, items: list[Item], encoded: ScoredItems, samples: list[Json]
) -> str:
    """Return a table row for a task with options.

    It has the number of different strings, acc, acc_norm, the number of different predictions, and
    the largest difference of log-likelihoods.
    """
    device = torch.device("cpu")
    found = log_likelihoods(model, encoded.requests, BATCH, device)
    scores = score(model, encoded, False, BATCH, device)
    strings = differences = 0
    largest = 0.0
    for item, options, sample in zip(items, encoded.options(), samples, strict=True):
        ours = [found[one] for one in options]
        theirs = [float(response[0]) for response in sample["filtered_resps"]]
        strings += [tuple(request) for request in sample["arguments"]] != list(item.requests)
        differences += theirs.index(max(theirs)) != ours.index(max(ours))
        largest = max(largest, *(abs(one - other) for one, other in zip(ours, theirs, strict=True)))
    cells = [f"{len(items)}", f"{strings}"]
    for metric in ("acc", "acc_norm"):
        theirs = [sample[metric] for sample in samples if metric in sample]
        cells += (
            [f"{scores[metric]:.4f}", f"{sum(theirs) / len(theirs):.4f}"] if theirs else ["", ""]
        )
    return " | ".join([*cells, f"{differences}", f"{largest:.1e}"])


def compare_answers(
    model: Any,
    tokenizer: Any,
    items: list[Item],
    samples: list[Json],
    max_tokens: int,
    how: Generation,
) -> list[str]:
    """Return a table row per answer pattern of a generation task.

    It has the number of different prompts, exact match, and the numbers of different texts and
    answers.
    """
    texts = generate(model, tokenizer, [item.prompt for item in items], how, max_tokens)
    scores = exact_match(texts, items, how)
    lines = []
    for name, answers in found_answers(texts, how).items():
        theirs = [sample for sample in samples if sample["filter"] == name]
        strings = sum(
            sample["arguments"][0][0] != item.prompt
            for item, sample in zip(items, theirs, strict=True)
        )
        written = sum(
            sample["resps"][0][0] != text for text, sample in zip(texts, theirs, strict=True)
        )
        other = sum(
            sample["filtered_resps"][0] != answer
            for answer, sample in zip(answers, theirs, strict=True)
        )
        score = sum(sample["exact_match"] for sample in theirs) / len(theirs)
        lines.append(
            f"{name} | {len(items)} | {strings} | {scores[name]:.4f} | {score:.4f} | {written} |"
            f" {other}"
        )
    return lines


def main() -> None:
    """Run the comparison and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", required=True, help="directory of a causal Hugging Face model and its tokenizer"
    )
    parser.add_argument(
        "--items", type=int, default=100, help="of each task: the first of its file"
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=0,
        help="how many the model takes; 0: as its config.json says",
    )
    parser.add_argument("files", nargs="+", metavar="TASK=FILE", help="JSON Lines")
    given = parser.parse_args()

    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(
        given.model, local_files_only=True, dtype=torch.float32
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(given.model, local_files_only=True)
    max_tokens = given.max_tokens or model.config.max_position_embeddings
    chosen = []
    generated = []
    with tempfile.TemporaryDirectory() as scratch:
        for named in given.files:
            name, _, path = named.partition("=")
            task = task_named(name)
            items = list(islice(items_in(task, path).items(), given.items))
            written = (line for line in Path(path).read_text().split("\n") if line.strip())
            records = [json.loads(line) for line in islice(written, given.items)]
            samples = harness_samples(model, tokenizer, name, records, max_tokens, Path(scratch))
            if task.generation:
                lines = compare_answers(
                    model, tokenizer, items, samples, max_tokens, task.generation
                )
                generated += [f"| {name}, {line} |" for line in lines]
            else:
                encoded = as_a_run_has_them(tokenizer, name, items, max_tokens)
                chosen.append(f"| {name} | {compare_options(model, items, encoded, samples)} |")
    if chosen:
        head = (
            "items | other strings | acc | lm-eval | acc_norm | lm-eval | other predictions |"
            " largest difference in nats"
        )
        print(f"\n| task | {head} |")
        print("|" + "---|" * 9)
        print("\n".join(chosen))
    if generated:
        print(
            "\n| task | items | other strings | exact match | lm-eval | other texts | other answers"
            " |\n|" + "---|" * 7
        )
        print("\n".join(generated))


if __name__ == "__main__":
    main()
