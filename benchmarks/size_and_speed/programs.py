"""Measurements of a result next to the dense model in one program."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.size_and_speed.subjects import HASH_CHARACTERS, Subject
from espalier.errors import InputError
from espalier.hf.gguf.model_file import write_model
from espalier.hf.stream.edits import dense as unchanged
from espalier.results.figures import PERPLEXITY
from espalier.results.speed import measured_apart

SCRIPT = Path(__file__).with_name("llama_cpp.mjs")
DTYPES = ("float32", "bfloat16")
LLAMA_CPP = "llama.cpp float16"
"""Program with GGUF files in float16."""
FILES = "files"
"""Name of the measures that need no program."""
PROGRAMS = (*(f"transformers {dtype}" for dtype in DTYPES), LLAMA_CPP)
MILLION = 1e6
PARAMETERS = "million parameters"
DISK = "MB on disk"
MEMORY = "MB load memory"
PREFILL = "prefill tokens/s"
DECODE = "decode tokens/s"


@dataclass(frozen=True)
class Measure:
    """Value of a result and of the dense model, and their ratio.

    The ratio of speeds is the median over turns of the ratio within a turn.
    """

    name: str
    value: float
    dense: float | None
    ratio: float | None


@dataclass(frozen=True)
class Job:
    """How much is measured."""

    threads: int
    prompt_tokens: int
    new_tokens: int
    turns: int
    node_modules: str
    """Directory with the npm package node-llama-cpp; empty to leave out llama.cpp."""
    work: Path
    """Folder of GGUF files, each written once."""


def refusal(subject: Subject, program: str, job: Job) -> str:
    """Return why a program cannot load a model; empty if it can.

    A file for llama.cpp is written to find out.
    """
    if program != LLAMA_CPP:
        return ""
    try:
        _gguf(subject, job)
    except InputError as error:
        # The directory stands before the first colon.
        return str(error).removeprefix(f"{subject.model.directory}: ")
    return ""


def measured(subject: Subject, dense: Subject, program: str, job: Job) -> Iterator[Measure]:
    """Yield the measures of a result in one program.

    Raises
    ------
    InputError
        A process failed.
    """
    if program == FILES:
        yield from _files(subject, dense)
    elif program == LLAMA_CPP:
        yield from _in_llama_cpp(subject, dense, job)
    else:
        yield from _in_transformers(subject, dense, program.split()[1], job)


def _files(subject: Subject, dense: Subject) -> Iterator[Measure]:
    pairs = {
        PARAMETERS: (subject.parameters, dense.parameters),
        DISK: (subject.num_bytes, dense.num_bytes),
    }
    for name, (value, of_dense) in pairs.items():
        yield Measure(name, value / MILLION, of_dense / MILLION, value / of_dense)
    known = subject.dense_perplexities
    for text, perplexity in subject.perplexities.items():
        before = known.get(text)
        yield Measure(
            f"{PERPLEXITY} {text}", perplexity, before, perplexity / before if before else None
        )


def _in_transformers(subject: Subject, dense: Subject, dtype: str, job: Job) -> Iterator[Measure]:
    paths = [str(one.model.directory) for one in (dense, subject)]
    short = {"prompt_tokens": job.prompt_tokens, "new_tokens": 2, "repetitions": 1, "batch_size": 1}
    memory: list[list[float]] = [[], []]
    for _ in range(job.turns):
        for path, own in zip(paths, memory, strict=True):
            figures = measured_apart({"model": path}, {**short, "dtype": dtype}, job.threads)
            own.append(figures["model_memory"])
    yield _median_of(MEMORY, memory)
    request = {
        "models": paths,
        "dtype": dtype,
        "prompt_tokens": job.prompt_tokens,
        "new_tokens": job.new_tokens,
        "turns": job.turns,
        "threads": job.threads,
    }
    command = [sys.executable, "-m", "benchmarks.size_and_speed.alternation"]
    yield from _speeds(_answer(command, request, job, subject), job)


def _in_llama_cpp(subject: Subject, dense: Subject, job: Job) -> Iterator[Measure]:
    files = [_gguf(one, job) for one in (dense, subject)]
    yield _median_of(DISK, [[file.stat().st_size] for file in files])
    vocabulary = min(one.model.configured("vocab_size") for one in (dense, subject))
    draw = random.Random(0)
    request = {
        "prompt": [draw.randrange(vocabulary) for _ in range(job.prompt_tokens)],
        "newTokens": job.new_tokens,
        "turns": job.turns,
        "threads": job.threads,
    }
    command = ["node", str(SCRIPT), job.node_modules]
    memory: list[list[float]] = [[], []]
    for _ in range(job.turns):
        for file, own in zip(files, memory, strict=True):
            alone = {**request, "models": [str(file)], "turns": 0, "newTokens": 1}
            own.append(_answer(command, alone, job, subject)["memory"])
    yield _median_of(MEMORY, memory)
    both = {**request, "models": [str(file) for file in files]}
    yield from _speeds(_answer(command, both, job, subject)["seconds"], job)


def _gguf_path(subject: Subject, job: Job) -> Path:
    """Return the path of a model's GGUF file; another model of this label has another one."""
    return job.work / f"{subject.label}-{subject.model.sha256[:HASH_CHARACTERS]}.gguf"


def _gguf(subject: Subject, job: Job) -> Path:
    """Write a GGUF file in float16 unless it is there, and return its path."""
    path = _gguf_path(subject, job)
    if not path.exists():
        job.work.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".unfinished")
        write_model(subject.model, unchanged, unfinished, subject.label, "float16")
        unfinished.rename(path)
    return path


def _answer(command: list[str], request: Mapping[str, Any], job: Job, subject: Subject) -> Any:
    done = subprocess.run(
        command,
        input=json.dumps(request),
        env={**os.environ, "OMP_NUM_THREADS": str(job.threads)},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(("{", "["))]
    if done.returncode or not lines:
        why = done.stderr.strip()[-800:] or f"exit code {done.returncode}"
        raise InputError(f"{subject.label}: cannot be measured by {command[0]} ({why})")
    return json.loads(lines[-1])


def _median_of(name: str, found: list[list[float]]) -> Measure:
    """Return the measure of numbers of bytes of the dense model and of the result."""
    dense, value = (median(own) / MILLION for own in found)
    return Measure(name, value, dense, value / dense)


def _speeds(seconds: list[list[dict[str, float]]], job: Job) -> Iterator[Measure]:
    """Yield tokens per second, of the seconds of each turn of the dense model and of the result."""
    for name, kind, tokens in ((PREFILL, "prefill", job.prompt_tokens), (DECODE, "decode", 1)):
        dense, value = ([tokens / turn[kind] for turn in own] for own in seconds)
        ratios = [one / other for one, other in zip(value, dense, strict=True)]
        yield Measure(name, median(value), median(dense), median(ratios))
