"""Sizes and speeds next to a dense model: arithmetic, notes and the report."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.reporting.rows import Rows
from benchmarks.size_and_speed import __main__ as command
from benchmarks.size_and_speed import programs
from benchmarks.size_and_speed.programs import FILES, LLAMA_CPP, Job, Measure, measured, refusal
from benchmarks.size_and_speed.report import FIGURES, KEYS, _by_result, _figure, write_report
from benchmarks.size_and_speed.subjects import Subject, open_dense, open_subject
from espalier.errors import InputError
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.stream.edits import dense as unchanged
from espalier.hf.structured.export import export_structured
from espalier.models.structure import Structure
from tests.hf.tiny_models import save_model, tiny_config

CONDITIONS = {
    "model": {"name": "base", "sha256": "0"},
    "processor": "some",
    "threads": 1,
    "prompt_tokens": 8,
    "new_tokens": 2,
    "turns": 3,
    "versions": {"torch": "2"},
}


def job_in(folder: Path) -> Job:
    return Job(1, 8, 2, 3, "modules", folder)


def smaller(folder: Path, base: Subject) -> Path:
    """Write a model whose blocks have different widths."""
    structure = Structure.whole(base.model.plan).keeping({1: {"channels": range(20)}})
    model = OpenedModel(base.model.directory, structure)
    export_structured(model, unchanged, folder, "compact")
    return folder


@pytest.fixture(name="dense")
def dense_model(tmp_path: Path) -> Subject:
    return open_dense(str(save_model(tmp_path / "base", tiny_config("llama"))))


def test_sizes_are_those_of_the_files(tmp_path: Path, dense: Subject) -> None:
    path = smaller(tmp_path / "small", dense)
    subject = open_subject(f"small={path}", dense, tmp_path, 1)
    found = {one.name: one for one in measured(subject, dense, FILES, job_in(tmp_path))}
    disk = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    before = sum(file.stat().st_size for file in dense.model.directory.glob("*.safetensors"))
    assert found["MB on disk"] == Measure("MB on disk", disk / 1e6, before / 1e6, disk / before)
    parameters = found["million parameters"]
    assert parameters.value * 1e6 == pytest.approx(subject.model.plan.num_parameters)
    assert parameters.ratio is not None
    assert parameters.ratio < 1


def test_perplexity_is_relative_to_the_dense_model_of_its_run(
    tmp_path: Path, dense: Subject
) -> None:
    path = smaller(tmp_path / "small", dense)
    small = open_subject(f"small={path}", dense, tmp_path, 1)
    given = replace(
        small, perplexities={"wiki": 30.0, "code": 12.0}, dense_perplexities={"wiki": 20.0}
    )
    found = {one.name: one for one in measured(given, dense, FILES, job_in(tmp_path))}
    assert found["perplexity wiki"] == Measure("perplexity wiki", 30.0, 20.0, 1.5)
    assert found["perplexity code"] == Measure("perplexity code", 12.0, None, None)


def test_another_model_of_a_label_has_another_file(tmp_path: Path) -> None:
    job = job_in(tmp_path / "work")
    job.work.mkdir()
    stale = job.work / "dense.gguf"
    stale.write_bytes(b"of another model")
    one, other = (
        open_dense(str(save_model(tmp_path / family, tiny_config(family))))
        for family in ("llama", "mistral")
    )
    assert programs._gguf_path(one, job) != programs._gguf_path(other, job)
    assert stale not in (programs._gguf_path(one, job), programs._gguf_path(other, job))


def test_speeds_by_hand() -> None:
    """Three turns of 8 prompt tokens: the ratio is the median of the ratios within turns."""
    seconds = [
        [{"prefill": 2.0, "decode": 0.5}, {"prefill": 4.0, "decode": 1.0},
         {"prefill": 8.0, "decode": 1.0}],
        [{"prefill": 1.0, "decode": 0.5}, {"prefill": 1.0, "decode": 0.5},
         {"prefill": 8.0, "decode": 0.5}],
    ]  # fmt: skip
    prefill, decode = programs._speeds(seconds, job_in(Path()))
    # Prompts: 4, 2, 1 tokens per second and 8, 8, 1; ratios 2, 4, 1.
    assert prefill == Measure("prefill tokens/s", 8.0, 2.0, 2.0)
    assert decode == Measure("decode tokens/s", 2.0, 1.0, 2.0)


def test_what_llama_cpp_cannot_load(tmp_path: Path, dense: Subject) -> None:
    """Neither norms of heads in blocks of different widths nor tokenizers of whole words."""
    job = job_in(tmp_path / "work")
    small = open_subject(f"small={smaller(tmp_path / 'small', dense)}", dense, tmp_path, 1)
    assert "tokenizer" in refusal(small, LLAMA_CPP, job)
    assert not list((tmp_path / "work").glob("*.gguf"))
    base = open_dense(str(save_model(tmp_path / "qwen3", tiny_config("qwen3"))))
    other = open_subject(f"other={smaller(tmp_path / 'other', base)}", base, tmp_path, 1)
    assert refusal(other, LLAMA_CPP, job).startswith("model_type = 'qwen3': its blocks differ")
    assert refusal(other, "transformers float32", job) == ""


def test_results_with_the_same_shapes(tmp_path: Path, dense: Subject) -> None:
    path = smaller(tmp_path / "small", dense)
    one, two = (open_subject(f"{name}={path}", dense, tmp_path, 1) for name in ("one", "two"))
    assert command._twin_of(two, [one]) == "one"
    assert command._twin_of(dense, [one, two]) == ""
    assert command._twin_of(one, [dense]) == ""


@pytest.mark.parametrize("given", ["small", "=small", "a/b=small"])
def test_labels(tmp_path: Path, dense: Subject, given: str) -> None:
    with pytest.raises(InputError, match="write LABEL=DIRECTORY"):
        open_subject(given, dense, tmp_path, 1)


def rows_in(folder: Path) -> Rows:
    rows = Rows(folder / "speed.csv", KEYS, FIGURES, CONDITIONS)
    for label in ("FLAP", "SliceGPT"):
        cell = {"result": label, "method": "flap", "note": ""}
        for program, measure, value, before in (
            (FILES, "million parameters", 8.0, 10.0),
            (FILES, "perplexity wiki", 30.0, 20.0),
            ("transformers float32", "MB load memory", 9.0, 10.0),
            ("transformers float32", "prefill tokens/s", 30.0, 20.0),
        ):
            figures = {"value": value, "dense": before, "ratio": value / before, "load": 1.5}
            rows.add(cell | {"program": program, "measure": measure}, **figures)
    absent = {"measure": "", "note": "not supported: its stream is sliced"}
    none = dict.fromkeys(FIGURES)
    rows.add({"result": "SliceGPT", "method": "", "program": LLAMA_CPP} | absent, **none)
    same = {"measure": "", "note": "as FLAP"}
    rows.add({"result": "tuned", "method": "", "program": LLAMA_CPP} | same, **none)
    return rows


def cells_of(table: str) -> dict[tuple[str, str], str]:
    """Return the cells of a table by label and heading; it begins with its second heading."""
    head, _, *lines = table.split("\n\n")[0].removesuffix("\n").splitlines()
    names = head.removesuffix(" |").split(" | ")
    found = {}
    for line in lines:
        label, *cells = line.removeprefix("| ").removesuffix(" |").split(" | ")
        found |= {(label, name): cell for name, cell in zip(names, cells, strict=True)}
    return found


def test_report(tmp_path: Path) -> None:
    write_report(rows_in(tmp_path), tmp_path / "speed")
    text = (tmp_path / "speed.md").read_text()
    quality, speed = (cells_of(table) for table in text.split("| result | ")[1:])
    assert quality["dense", "parameters, M"] == "10.0"
    assert quality["FLAP", "parameters, M"] == "8.0 (0.80)"
    assert quality["FLAP", "perplexity wiki"] == "30.0 (1.50)"
    assert quality["FLAP", "memory and speed"] == "below"
    assert quality["tuned", "memory and speed"] == "as FLAP"
    assert speed["FLAP", "prompt: transformers float32"] == "30.0 (1.50)"
    assert speed["FLAP", "prompt: llama.cpp float16"] == "not measured"
    assert speed["SliceGPT", "prompt: llama.cpp float16"] == "not supported"
    assert ("tuned", "prompt: llama.cpp float16") not in speed
    assert "- SliceGPT, llama.cpp float16: not supported: its stream is sliced" in text
    assert "Load of the machine when a measurement began: 1.5 to 1.5" in text
    assert (tmp_path / "speed.png").exists()
    assert "SliceGPT" in (tmp_path / "speed.svg").read_text()


def test_ratios_of_the_figure(tmp_path: Path) -> None:
    """A tuned result has no row of its own, and zeros change neither size nor speed."""
    rows = rows_in(tmp_path)
    none = dict.fromkeys(FIGURES)
    files = {"result": "FLAP, tuned", "method": "", "program": FILES, "note": ""}
    for text, value in (("wiki", 40.0), ("code", 5.0)):
        rows.add(files | {"measure": f"perplexity {text}"}, **none | {"value": value})
    again = {"result": "FLAP", "method": "", "program": FILES, "measure": "perplexity code"}
    rows.add(again | {"note": ""}, value=20.0, dense=10.0, ratio=2.0, load=1.0)
    zeros = {"result": "FedPrLLM", "method": "", "program": "transformers bfloat16"}
    rows.add(zeros | {"measure": "", "note": "as dense"}, **none)
    perplexity, size, _ = _figure(_by_result(rows)).panels
    # Geometric means of 30 / 20 and 20 / 10, and of 40 / 20 and 5 / 10.
    untuned, tuned = (series.values for series in perplexity.series)
    assert untuned["FLAP"] == [pytest.approx(3.0**0.5)]
    assert untuned["SliceGPT"] == [1.5]
    assert tuned == {"FLAP": [1.0]}
    memory = size.series[1].values
    assert memory == {"FedPrLLM": [1.0]}


def test_command_measures_what_is_missing(
    tmp_path: Path, dense: Subject, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    path = smaller(tmp_path / "small", dense)
    asked = []

    def measure(subject: Subject, dense: Subject, program: str, job: Job) -> list[Measure]:
        asked.append((subject.label, program))
        return [Measure("MB load memory", 1.0, 2.0, 0.5)]

    monkeypatch.setattr(command, "measured", measure)
    words = ["x", "--dense", str(dense.model.directory), "--out", str(tmp_path / "found" / "speed")]
    words += ["--work", str(tmp_path / "work")]
    monkeypatch.setattr(sys, "argv", [*words, "--result", f"one={path}"])
    assert command.main() == 0
    of_one = [("one", FILES), ("one", "transformers float32"), ("one", "transformers bfloat16")]
    assert asked == of_one
    both = [*words, "--result", f"one={path}", "--result", f"two={path}"]
    monkeypatch.setattr(sys, "argv", both)
    assert command.main() == 0
    assert asked == [*of_one, ("two", FILES)]
    assert "as one" in (tmp_path / "found" / "speed.md").read_text()
    monkeypatch.setattr(sys, "argv", [*both, "--turns", "9"])
    assert command.main() == 2
    assert "was measured with other turns" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", [*both, "--node-modules", str(tmp_path)])
    assert command.main() == 2
    assert "has no node-llama-cpp" in capsys.readouterr().err
