"""Sections of the report, from run directories that are written by hand."""

import json
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
from safetensors.numpy import save_file

from espalier.errors import InputError
from espalier.results.finished_run import FinishedRun, open_run
from espalier.results.report.command import main
from espalier.results.report.comparison import comparisons_of, measure_title
from espalier.results.report.egress import site_logs
from espalier.results.report.layers import layers_of
from espalier.results.report.page import report_page
from espalier.results.report.rounds import curves_of
from espalier.results.report.run_settings import changed_settings
from espalier.results.report.traffic import estimates_of, traffic_of
from espalier.results.report.usage import snippets_of
from espalier.results.report.verdict import verdict
from espalier.results.run_status import run_status
from espalier.settings.tables.evaluation import OWN_TEXT
from espalier.storage.hash_chain import HashChain

HOSTILE = '<script>alert("x")</script> $a_b$ & {{ 7 * 7 }}'


def client(number: int, **metrics: float) -> dict[str, Any]:
    """Return the entry of a client in ``summary.json``."""
    return {
        "client": number, "site": f"site-{number}", "status": "completed", "reason": None,
        "capped": {}, "bytes_up": 100, "bytes_down": 50, "seconds": 1.5, "metrics": metrics,
    }  # fmt: skip


def metric(name: str, dataset: str, direction: str = "lower", **values: float) -> dict[str, Any]:
    """Return the entry of a measure in ``summary.json``."""
    columns = ("dense", "local_baseline", "centralized", "federated")
    return {
        "name": name, "dataset": dataset, "direction": direction,
        "values": {column: values.get(column) for column in columns},
        "medians_of_clients": {}, "worst_of_clients": {},
    }  # fmt: skip


def size(parameters: float, num_bytes: float, folder: str | None = None) -> dict[str, Any]:
    return {"parameters": parameters, "bytes": num_bytes, "folder": folder}


def write_run(folder: Path, settings: dict[str, Any] | None = None, **changes: Any) -> FinishedRun:
    """Write a run directory, and return the run."""
    folder.mkdir(exist_ok=True)
    document = {
        "schema_version": 2, "status": "completed", "reason": None, "method": "flap", "seed": 0,
        "num_clients": 2, "clients": [client(0), client(1)], "finished": 2, "missing": [],
        "refused": {}, "rounds": 1, "sparsity": {"achieved": 0.2}, "size": {}, "warnings": [],
        "report": {}, "metrics": [], "test_items": None, "bytes_up": 200, "bytes_down": 100,
        "seconds": 61.0, "model": "base", "model_revision": None, "model_sha256": "0" * 64,
        "versions": {"espalier": "0.1.0"}, "threads": 1, "device": "cpu",
    } | changes  # fmt: skip
    (folder / "summary.json").write_text(json.dumps(document))
    given = {"method": "flap", "model": "nowhere/", **(settings or {})}
    (folder / "settings.toml").write_text(tomli_w.dumps(given))
    return open_run(folder)


def sentences(run: FinishedRun) -> str:
    return " ".join(verdict(run, comparisons_of(run)))


def test_a_chain_of_runs_has_the_model_with_which_it_began(tmp_path: Path) -> None:
    """Only values on the same samples are in one row."""
    sizes = {"dense": size(1000, 4000), "federated": size(800, 3200, "model")}
    measures = [
        metric("perplexity", "wiki", dense=40.0, federated=60.0) | {"samples_sha256": "1" * 64},
        metric("perplexity", "code", dense=10.0, federated=12.0) | {"samples_sha256": "2" * 64},
    ]
    pruned = write_run(tmp_path / "pruned", size=sizes, metrics=measures)
    (pruned.path / "run.json").write_text("{}")
    link = {"model": "model", "run": str(pruned.path), "method": "flap"}
    sizes = {"dense": size(800, 3200), "federated": size(800, 3200, "model")}
    other = measures[1] | {"samples_sha256": "3" * 64}
    tuned = write_run(tmp_path / "tuned", size=sizes, metrics=[measures[0], other], base=[link])
    wiki, code = comparisons_of(tuned)
    assert wiki.values["original"].value == 40.0
    assert "original" not in code.values
    assert wiki.names["dense"] == "base (flap)"
    assert "60.00 with the federated result and 40.00 with the base model (flap)" in sentences(
        tuned
    )
    assert "chain of runs began has 40.00, the result 1.5 times that" in sentences(tuned)
    assert "began has 1,000 parameters; the result has 80.0% of them" in sentences(tuned)
    page = report_page(tuned)
    assert "125.0%" in page
    assert "base (flap)" in page
    assert comparisons_of(pruned)[0].names["dense"] == "dense"


@pytest.mark.parametrize(
    ("change", "lacking"),
    [
        (lambda summary: summary.pop("bytes_up"), "bytes_up"),
        (lambda summary: summary.pop("threads"), "threads"),
        (lambda summary: summary["clients"][1].pop("metrics"), "metrics of a client"),
    ],
)
def test_what_a_summary_lacks_is_named(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any], lacking: str
) -> None:
    path = write_run(tmp_path / "run").path
    summary = json.loads((path / "summary.json").read_text())
    change(summary)
    (path / "summary.json").write_text(json.dumps(summary))
    with pytest.raises(InputError, match=rf"summary.json: lacks {lacking}: another version"):
        report_page(open_run(path))


# ----- verdict ------------------------------------------------------------------------------------


def test_a_result_without_scores_is_said_to_be_unknown(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", metrics=[metric("perplexity", "wiki", dense=40.0)])
    assert "The result was not evaluated, so its quality is unknown." in sentences(run)


def test_verdict_on_a_smaller_model(tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "run",
        metrics=[
            metric("perplexity", "wiki", dense=40.0, federated=50.0, local_baseline=60.0),
            metric("perplexity", "code", dense=10.0, federated=9.0),
        ],
        size={"dense": size(1000, 4000), "federated": size(800, 3200, "model")},
    )
    text = sentences(run)
    assert (
        "Perplexity on wiki is 50.00 with the federated result and 40.00 with the dense model:"
        " worse by 25.0% (better on 1 of 2 texts and tasks)." in text
    )
    assert "It is better than what clients get without the others (60.00)." in text
    assert "The model has 800 parameters, 20.0% fewer than its base, and takes 3.2 kB" in text
    assert "Zeros" not in text
    assert "2 of 2 clients took part to the end; a client sent 100 B on average" in text


def test_values_that_look_alike_are_called_alike(tmp_path: Path) -> None:
    """Values are compared as they are shown."""
    values = {"dense": 40.001, "federated": 40.002, "local_baseline": 40.004}
    text = sentences(write_run(tmp_path / "run", metrics=[metric("perplexity", "wiki", **values)]))
    assert "40.00 with the federated result and 40.00 with the dense model: unchanged." in text
    assert "It is as good as what clients get without the others (40.00)." in text


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (size(1000, 4000, "model"), "Zeros make a model neither smaller nor faster."),
        (size(1050, 4200, "model"), "5.0% more than its base"),
        (size(64, 256, "adapter"), "The adapter adds 64 parameters (256 B)"),
        (size(900.0, 3600.0, "clients"), "Each client's model has 900 parameters on average"),
    ],
)
def test_verdict_on_sizes(tmp_path: Path, now: dict[str, Any], expected: str) -> None:
    run = write_run(tmp_path / "run", size={"dense": size(1000, 4000), "federated": now})
    assert expected in sentences(run)


@pytest.mark.parametrize(
    ("accuracy", "overlap"), [((0.50, 0.52), True), ((0.20, 0.90), False), ((0.5, 0.5), True)]
)
def test_verdict_says_that_intervals_overlap(
    tmp_path: Path, accuracy: tuple[float, float], overlap: bool
) -> None:
    before, after = accuracy
    run = write_run(
        tmp_path / "run",
        metrics=[metric("acc", "boolq", "higher", dense=before, federated=after)],
        test_items={"number": 100, "cut": 0},
    )
    assert ("the intervals of both overlap" in sentences(run)) is overlap
    words = "unchanged" if before == after else "better by"
    assert words in sentences(run)


def test_status(tmp_path: Path) -> None:
    assert run_status(write_run(tmp_path / "run", status="running").path)[0] == "interrupted"
    failed = write_run(tmp_path / "run", status="failed", reason="RunFailed: no\nsite-0: why")
    assert sentences(failed).startswith("The run failed: RunFailed: no ")
    assert "site-0: why" in report_page(failed)


# ----- quality ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "direction", "values", "words"),
    [
        ("acc", "higher", (0.5, 0.55), "better by 0.050"),
        ("loss", "lower", (2.5, 2.75), "worse by 0.250"),
        ("perplexity", "lower", (20.0, 25.0), "worse by 25.0%"),
    ],
)
def test_verdict_tells_differences_in_the_unit_of_the_measure(
    tmp_path: Path, name: str, direction: str, values: tuple[float, float], words: str
) -> None:
    before, after = values
    entry = metric(name, "boolq", direction, dense=before, federated=after)
    assert words in sentences(write_run(tmp_path / "run", metrics=[entry]))


def test_verdict_counts_texts_and_tasks_once(tmp_path: Path) -> None:
    """Two scores of one task are not two pieces of evidence."""
    both = [
        metric(name, "boolq", "higher", dense=0.5, federated=0.6) for name in ("acc", "acc_norm")
    ]
    text = metric("perplexity", "wiki", dense=10.0, federated=11.0)
    assert "1 of 2 texts and tasks" in sentences(write_run(tmp_path / "a", metrics=[*both, text]))
    assert "texts and tasks" not in sentences(write_run(tmp_path / "b", metrics=both))


def test_verdict_counts_clients(tmp_path: Path) -> None:
    """Intervals over clients overlap although most clients gain, so clients are counted."""
    entry = metric("perplexity", "own-text", dense=20.0, federated=19.0)
    entry["medians_of_clients"] = {"dense": 20.0, "federated": 19.0}
    name = "perplexity/own-text"
    values = {0: (10.0, 9.0), 1: (20.0, 18.0), 2: (30.0, 31.0)}
    run = write_run(
        tmp_path / "run",
        metrics=[entry],
        clients=[
            client(number, **{f"{name}/dense": before, f"{name}/federated": after})
            for number, (before, after) in values.items()
        ],
    )
    assert "(better for 2 of 3 clients)" in sentences(run)
    assert "overlap" not in sentences(run)


@pytest.mark.parametrize("column", ["local_baseline", "federated"])
def test_values_of_clients_are_found(tmp_path: Path, column: str) -> None:
    name = "loss/dolly"
    entry = metric("loss", "dolly", dense=2.0, **{column: 1.5})
    entry["medians_of_clients"] = {column: 1.0}
    run = write_run(
        tmp_path / "run",
        metrics=[entry],
        clients=[client(0, **{name: 1.0}), client(1, **{name: 2})],
    )
    (comparison,) = comparisons_of(run)
    assert comparison.values[column].clients == {0: 1.0, 1: 2.0}
    assert comparison.values[column].interval is None, "two clients are too few"
    assert comparison.values["dense"].clients == {}


def test_own_text_has_values_of_clients_for_each_model(tmp_path: Path) -> None:
    entry = metric("perplexity", "own-text", dense=11.0, federated=9.0)
    entry["medians_of_clients"] = {"dense": 10.0, "federated": 8.0}
    clients = [
        client(0, **{"perplexity/own-text/dense": 10.0, "perplexity/own-text/federated": 8.0}),
        client(1, **{"perplexity/own-text/dense": 12.0, "perplexity/own-text/federated": 10.0}),
    ]
    run = write_run(tmp_path / "run", metrics=[entry], clients=clients)
    (comparison,) = comparisons_of(run)
    assert comparison.values["federated"].clients == {0: 8.0, 1: 10.0}
    assert "Perplexity on the clients&#39; own text" in report_page(run)


def test_rounds_of_one_model_and_of_each_client(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    rounds = [
        {"round": 1, "perplexity": {"wiki": 9.0}},
        {"round": 2, "perplexity": {"wiki": None}, "scores": {"acc": {"0": 0.5, "1": 0.25}}},
    ]
    (tmp_path / "run" / "rounds.json").write_text(json.dumps({"rounds": rounds}))
    one, several = curves_of(run)
    assert (one.title, one.points) == ("Perplexity on wiki", {"federated": {1: 9.0}})
    assert several.points == {"client 0": {2: 0.5}, "client 1": {2: 0.25}}


# ----- bytes and estimates ------------------------------------------------------------------------


def test_bytes_by_kind(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    entries = [
        ("train", "down", None, 10), ("train", "up", None, 20), ("train", "up", "block-0000", 300),
        ("enrol", "up", None, 4), ("round", None, None, 0),
    ]  # fmt: skip
    lines = [
        {"kind": kind, "direction": direction, "block": block, "wire_bytes": number}
        for kind, direction, block, number in entries
    ]
    (tmp_path / "run" / "ledger.jsonl").write_text("".join(f"{json.dumps(x)}\n" for x in lines))
    assert [(kind.name, kind.up, kind.down, kind.messages) for kind in traffic_of(run)] == [
        ("enrol", 4, 0, 1),
        ("train", 320, 10, 2),
    ]
    assert "<td>all</td><td>324 B</td>\n<td>10 B</td>" in report_page(run)


@pytest.mark.parametrize(
    ("key", "title"),
    [
        ("acc_norm/sst2", "Accuracy (per character) on sst2"),
        (f"perplexity/{OWN_TEXT}", "Perplexity on the clients' own text"),
        ("skipped_steps", "skipped steps"),
        ("lora_rank", "LoRA rank"),
    ],
)
def test_columns_of_clients_have_names(key: str, title: str) -> None:
    assert measure_title(key) == title


def test_estimates_are_compared_with_measurements(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", bytes_up=300, bytes_down=50)
    assert estimates_of(run) == []
    plan = {
        "bytes_up": 400, "least_bytes_up": 200, "bytes_down": 50, "least_bytes_down": 50,
        "server_memory": 1000, "client_memory": 2000, "server_disk": 10**6, "client_disk": 1,
        "seconds": {"round_of_a_client": 2.0, "teraflops": 0.05, "measured": True},
        "measured": {"server_memory": 1500},
    }  # fmt: skip
    (tmp_path / "run" / "plan.json").write_text(json.dumps(plan))
    times = {"run": 9.0, "clients": {"0": [6.0, 2.0], "1": [10.0, 2.0]}}
    (tmp_path / "run" / "seconds.json").write_text(json.dumps(times))
    rows = {row.what.partition(",")[0]: row for row in estimates_of(run)}
    assert (rows["bytes up"].estimate, rows["bytes up"].ratio) == ("200 B to 400 B", 0.75)
    assert rows["bytes down"].ratio == 1.0
    assert rows["memory of the server"].ratio == 1.5
    assert rows["memory of a client"].measured == "stays there"
    plan["measured"] = {"server_memory": 1500, "client_memory": 1000}
    (tmp_path / "run" / "plan.json").write_text(json.dumps(plan))
    (of_client,) = (row for row in estimates_of(run) if row.what.startswith("memory of a client"))
    assert (of_client.measured, of_client.ratio) == ("1 kB", 0.5)
    assert rows["round of a client"].ratio == 2.0
    assert "Estimated and measured" in report_page(run)
    at_work = FinishedRun(run.path, {**run.summary, "finished": None})
    assert [row.measured for row in estimates_of(at_work)][:2] == ["not recorded"] * 2


# ----- layers -------------------------------------------------------------------------------------


def test_zeros_of_each_matrix(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (tmp_path / "run" / "model").mkdir()
    (tmp_path / "run" / "model" / "config.json").write_text("{}")
    name = "model.layers.3.self_attn.q_proj.weight"
    save_file({name: np.zeros((5, 2))}, tmp_path / "run" / "model" / "model.safetensors")
    save_file({name: np.array([0b0111], np.uint64)}, tmp_path / "run" / "masks.safetensors")
    (heat,) = layers_of(run).maps
    assert (heat.columns, heat.rows) == (["q"], {3: [0.3]})


@pytest.mark.parametrize("content", [b"", b"\xff" * 50])
def test_damaged_masks_are_an_error(tmp_path: Path, content: bytes) -> None:
    run = write_run(tmp_path / "run")
    (tmp_path / "run" / "masks.safetensors").write_bytes(content)
    with pytest.raises(InputError, match=r"masks\.safetensors: cannot be read .*; restore it"):
        layers_of(run)


def test_removed_blocks_and_widths_are_told(tmp_path: Path) -> None:
    report = {"removed_blocks": [2, 3], "width": 48, "width_of_the_base": 64}
    notes = " ".join(layers_of(write_run(tmp_path / "run", report=report)).notes)
    assert "removed: 2, 3." in notes
    assert "has 48 dimensions, where the base model has 64." in notes


def test_missing_base_is_told(tmp_path: Path) -> None:
    units = {"groups_of_blocks": [{"groups": 1, "channels": 2}]}
    layers = layers_of(write_run(tmp_path / "run", report=units))
    assert layers.maps == []
    assert "nowhere" in layers.notes[0]


# ----- what left the sites ------------------------------------------------------------------------


def test_logs_are_counted_and_verified(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (tmp_path / "run" / "egress").mkdir()
    path = tmp_path / "run" / "egress" / "egress-a.jsonl"
    log = HashChain(path, {"lineage": "20260131-093000-0123456789ab", "site": "hospital"})
    tensors = {"x": {"dtype": "F32", "shape": [2]}, "y": {"dtype": "BF16", "shape": [2]}}
    reply = {"entry": "reply", "kind": "train", "time": "2026-01-31T09:30:00+00:00"}
    log.append({**reply, "bytes": 30, "fields": ["tokens"], "blobs": [{"tensors": tensors}]})
    head = log.append({**reply, "bytes": 12, "fields": ["seconds"], "blobs": []})
    (found,) = site_logs(run)
    assert (found.site, found.checked.fault, found.checked.head) == ("hospital", "", head)
    assert "hospital: 2 replies, 42 B" in report_page(run)
    assert found.kinds["train"].fields == {"tokens", "seconds"}
    assert (found.kinds["train"].tensors, found.kinds["train"].dtypes) == (2, {"F32", "BF16"})
    assert head in report_page(run)
    path.write_text(path.read_text().replace('"bytes":12', '"bytes":13'))
    assert site_logs(run)[0].checked.fault
    assert "LOG IS BROKEN" in report_page(run)


# ----- settings and use ---------------------------------------------------------------------------


def test_settings_that_differ(tmp_path: Path) -> None:
    settings = {"seed": 0, "num-clients": 8, "pruning": {"ratio": 0.4, "selection": "auto"}}
    run = write_run(tmp_path / "run", settings)
    changed = {one.key: (one.value, one.default) for one in changed_settings(run)}
    assert changed == {
        "method": ("flap", "fedprllm"),
        "model": ("nowhere/", "demo"),
        "pruning.ratio": ("0.4", "0.2"),
    }


@pytest.mark.parametrize(
    ("config", "lines"),
    [
        ({}, ['AutoModelForCausalLM.from_pretrained("', "espalier chat '", "espalier eval '"]),
        (
            {"auto_map": {}, "model_type": "llama"},
            ['/model", trust_remote_code=True)', "run' --to gguf --out"],
        ),
        (
            {"architectures": ["BertForSequenceClassification"]},
            ["AutoModelForSequenceClassification", "argmax(-1)"],
        ),
    ],
)
def test_lines_for_each_kind_of_model(
    tmp_path: Path, config: dict[str, Any], lines: list[str]
) -> None:
    run = write_run(tmp_path / "it's a run")
    (run.path / "model").mkdir()
    (run.path / "model" / "config.json").write_text(json.dumps(config))
    snippets = snippets_of(run)
    text = "\n".join(one.text for one in snippets)
    assert all(line in text for line in lines)
    compile(snippets[0].text, "snippet", "exec")


def test_only_programs_that_can_serve_a_result_are_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    file = tmp_path / "run" / "clients" / "site-a" / "config.json"
    file.parent.mkdir(parents=True)
    of_client = f"{run.path} --client site-a"
    for config, lines in (
        ({"model_type": "qwen3"}, [f"{of_client} --to transformers", f"{of_client} --to gguf"]),
        ({"model_type": "gemma2"}, [f"{of_client} --to transformers"]),
        ({"model_type": "llama", "auto_map": {}}, [f"{of_client} --to gguf"]),
        ({"model_type": "sliced-llama", "auto_map": {}}, []),
    ):
        file.write_text(json.dumps(config))
        *_, talk, _, serve = snippets_of(run)
        assert talk.text == f"espalier chat {of_client} --compare"
        found = [line for line in serve.text.splitlines() if line.startswith("espalier")]
        assert [line.partition(" --out")[0] for line in found] == [
            f"espalier export {line}" for line in lines
        ]


def test_lines_for_an_adapter(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    pruned = tmp_path / "pruned" / "model"
    pruned.mkdir(parents=True)
    (pruned / "config.json").write_text('{"auto_map": {}}')
    (run.path / "adapter").mkdir()
    save_file(
        {"base_model.model.classifier.weight": np.zeros((3, 4), np.float32)},
        run.path / "adapter" / "adapter_model.safetensors",
    )
    for base, kind, line in (
        ("owner/name", "CAUSAL_LM", 'AutoPeftModelForCausalLM.from_pretrained("'),
        (str(pruned), "CAUSAL_LM", '/adapter", trust_remote_code=True)'),
        (
            "owner/name",
            "SEQ_CLS",
            (
                "AutoPeftModelForSequenceClassification.from_pretrained("
                f'"{run.path}/adapter", num_labels=3)'
            ),
        ),
    ):
        config = {"task_type": kind, "base_model_name_or_path": base, "r": 2, "lora_alpha": 4.0}
        config["peft_type"] = "LORA"
        (run.path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
        text = snippets_of(run)[0].text
        assert line in text
        assert f'AutoTokenizer.from_pretrained("{base}")' in text


def test_lines_for_an_adapter_whose_base_was_moved_with_it(tmp_path: Path) -> None:
    (tmp_path / "now").mkdir()
    pruned = write_run(tmp_path / "now" / "pruned")
    (pruned.path / "model").mkdir()
    (pruned.path / "model" / "config.json").write_text('{"auto_map": {}}')
    before = str(tmp_path / "before" / "pruned")
    link = {"model": "demo, flap", "run": before, "path": f"{before}/model", "method": "flap"}
    run = write_run(tmp_path / "now" / "tuned", base=[link])
    (run.path / "adapter").mkdir()
    (run.path / "adapter" / "adapter_model.safetensors").write_bytes(b"")
    config = {"task_type": "CAUSAL_LM", "base_model_name_or_path": f"{before}/model"}
    config |= {"peft_type": "LORA", "r": 2, "lora_alpha": 4.0}
    (run.path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    first, *others = snippets_of(run)
    place = f'"{pruned.path}/model"'
    assert f"AutoModelForCausalLM.from_pretrained({place}, trust_remote_code=True)" in first.text
    assert f'PeftModel.from_pretrained(model, "{run.path}/adapter")' in first.text
    assert f"AutoTokenizer.from_pretrained({place})" in first.text
    assert any("espalier chat" in one.text for one in others)


# ----- the page -----------------------------------------------------------------------------------


def test_a_directory_without_a_run_costs_no_other_its_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run")
    (tmp_path / "trackio").mkdir()
    given = [str(tmp_path / "trackio"), str(run.path)]
    assert main({"directories": given, "out": None, "measure": False, "base": None}) == 2
    assert (run.path / "report.html").is_file()
    said = capsys.readouterr().err
    assert "trackio: is not a run directory" in said
    assert "1 of 2 directories have got no report" in said


@pytest.mark.parametrize(
    "damage",
    [
        {"site": ...}, {"reason": ...}, {"capped": ...}, {"bytes_up": -1}, {"seconds": 1e300},
        {"metrics": {"loss/dolly": "x"}}, {"metrics": {"loss/dolly": [1.0]}},
    ],
)  # fmt: skip
def test_a_damaged_entry_of_a_client_is_named(tmp_path: Path, damage: dict[str, Any]) -> None:
    one = client(0, **{"loss/dolly": 1.0}) | damage
    one = {key: value for key, value in one.items() if value is not ...}
    with pytest.raises(InputError, match=r"summary\.json: .*restore the file from a backup"):
        report_page(open_run(write_run(tmp_path / "run", clients=[one]).path))


def test_enormous_values_are_not_drawn(tmp_path: Path) -> None:
    values = {"dense": 20.0, "federated": 10**200, "centralized": 3.5e300}
    run = write_run(tmp_path / "run", metrics=[metric("perplexity", "wiki", **values)])
    assert "Perplexity on wiki" in report_page(run)


def test_texts_from_outside_are_escaped(tmp_path: Path) -> None:
    entry = metric("perplexity", HOSTILE, dense=2.0, federated=1.0)
    entry["medians_of_clients"] = {"federated": 1.0}
    clients = [
        client(number, **{f"perplexity/{HOSTILE}/federated": 1.0 + number}) for number in (0, 1)
    ]
    for one in clients:
        one |= {"site": HOSTILE, "reason": f"{HOSTILE}\x1b[31m", "capped": {HOSTILE: {}}}
    run = write_run(
        tmp_path / "run",
        {"flap": {"form": HOSTILE}},
        metrics=[entry],
        clients=clients,
        warnings=[HOSTILE],
        missing=[{"site": HOSTILE, "reason": HOSTILE}],
        refused={HOSTILE: HOSTILE},
        status="failed",
        reason=f"{HOSTILE}\n{HOSTILE}",
    )
    page = report_page(run)
    tags: list[str] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attrs: tags.append(tag)  # type: ignore[method-assign]
    parser.feed(page)
    assert "script" not in tags
    assert "\x1b" not in page
    assert "{{ 7 * 7 }}" in page
    assert page.count("&lt;script&gt;") > 10


def test_wrong_requests_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run")
    where = str(run.path)
    for directories, out, message in (
        ([str(tmp_path)], None, "is not a run directory"),
        ([where, where], "x.html", "each has a report of its own"),
        ([where], str(tmp_path), "is a directory; name a file in it"),
        ([where], "/proc/none/x.html", "/proc/none is not a directory"),
    ):
        assert main({"directories": directories, "out": out, "measure": False, "base": None}) == 2
        assert message in capsys.readouterr().err
    assert not (run.path / "report.html").exists()
    out = tmp_path / "page.html"
    assert main({"directories": [where], "out": str(out), "measure": False, "base": None}) == 0
    assert out.exists()
    assert main({"directories": [where], "out": None, "measure": True, "base": None}) == 2
    assert "has neither model/config.json nor adapter/" in capsys.readouterr().err
    named = {"directories": [where], "out": None, "measure": False, "base": "demo"}
    assert main(named) == 2
    assert "--base demo: is read with --measure only" in capsys.readouterr().err
