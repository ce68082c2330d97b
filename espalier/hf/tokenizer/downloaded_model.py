"""Model that a server sent; its tokenizer runs in a separate process with time and memory limits.

The process returns only numbers: token ids, masks, offsets and a few facts, bounded by the lengths
of the texts. Results equal those of the tokenizer itself. If the process dies or reports a failure,
the work fails with an error message, and the next request starts a new process.
"""

import json
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from espalier.environment.bounded_json import read_json
from espalier.environment.imports import importing
from espalier.errors import EspalierError, InputError
from espalier.hf.opening.opened import OpenedModel, _stamps
from espalier.hf.tokenizer import process as tokenizer_process
from espalier.hf.tokenizer.process import ARRAYS, LENGTHS

MAX_HEAD = 1 << 20
HEAD_PER_TEXT = 16
"""Maximum size of an answer's head in bytes: ``MAX_HEAD``, plus this number per text."""
TOKENS_PER_CHARACTER = 64
"""Maximum number of tokens per character.

A character has up to four bytes, each of which may be a token, and a normalizer may turn it into
16 characters.
"""
MORE_TOKENS = 4096
"""Number of tokens of a text that are allowed in addition."""
MAX_DECODED = 4096
"""Maximum number of characters of a decoded text."""
DYING_SECONDS = 60.0
"""Seconds to wait for the exit code of a process that has closed its output."""


class DownloadedModel(OpenedModel):
    """Model directory that a server sent."""

    @cached_property
    def tokenizer(self) -> Any:
        """Tokenizer in another process; all models of the same files share it within a process."""
        return _tokenizer_in_process(self.directory, _stamps(self.directory))

    @property
    def num_tokens(self) -> int:
        """Highest token id of the tokenizer, plus 1."""
        return int(self.tokenizer.facts["num_tokens"])


def open_downloaded(directory: Path) -> DownloadedModel:
    """Open a model that a server sent.

    Within a process, callers share the same model as long as the files do not change.

    Raises
    ------
    InputError
        See ``OpenedModel``.
    """
    return _opened(directory, _stamps(directory))


@lru_cache(maxsize=2)
def _opened(directory: Path, stamps: object) -> DownloadedModel:
    return DownloadedModel(directory)


@lru_cache(maxsize=2)
def _tokenizer_in_process(directory: Path, stamps: object) -> "ProcessTokenizer":
    return ProcessTokenizer(directory)


class ProcessTokenizer:
    """Tokenizer in another process, with those methods of Hugging Face that clients use."""

    def __init__(self, directory: Path) -> None:
        self._process = TokenizerProcess(directory)

    @cached_property
    def facts(self) -> dict[str, Any]:
        """Properties of the tokenizer, such as the number of tokens."""
        found = self._process.ask({"what": "facts"}, 0)[0]
        whole = (
            "num_tokens",
            "length",
            *(name for name in ("eos_token_id", "pad_token_id") if found.get(name) is not None),
        )
        special = found.get("all_special_ids")
        if not (
            isinstance(special, list)
            and all(type(number) is int for number in (*map(found.get, whole), *special))
        ):
            raise self._process.fault("has properties that no tokenizer has")
        return found

    @property
    def eos_token_id(self) -> int | None:
        """Token id that ends a text."""
        return self.facts["eos_token_id"]

    @property
    def pad_token_id(self) -> int | None:
        """Token id for padding."""
        return self.facts["pad_token_id"]

    @property
    def all_special_ids(self) -> list[int]:
        """Token ids that stand for no text."""
        return list(self.facts["all_special_ids"])

    def __len__(self) -> int:
        return int(self.facts["length"])

    def encode(self, text: str, **options: Any) -> list[int]:
        """Return the token ids of a text."""
        found: list[int] = self(text, **options)["input_ids"]
        return found

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of some token ids."""
        text = self._process.ask({"what": "decode", "ids": list(ids)}, 0)[0].get("text")
        if not isinstance(text, str) or len(text) > MAX_DECODED:
            raise self._process.fault("made more of a token than any tokenizer does")
        return text

    def __call__(
        self,
        texts: str | Sequence[str],
        pairs: str | Sequence[str] | None = None,
        return_tensors: str = "",
        **options: Any,
    ) -> dict[str, Any]:
        """Encode one or several texts, like the tokenizers of Hugging Face.

        Parameters
        ----------
        texts : one text or several
        pairs : second text of each pair, if any
        return_tensors : ``"pt"`` for tensors, otherwise lists
        options : further options of the tokenizer

        Returns
        -------
        dict
            ``input_ids``, ``attention_mask`` and, if requested, ``offset_mapping``
        """
        many = not isinstance(texts, str)
        columns = [
            [column] if isinstance(column, str) else list(column)
            for column in (texts, pairs)
            if column is not None
        ]
        request = {"what": "encode", "many": many, "texts": columns, "options": options}
        longest = max((sum(map(len, row)) for row in zip(*columns, strict=True)), default=0)
        # Padding makes every row as long as the longest one.
        padded = (
            max(longest * TOKENS_PER_CHARACTER, options.get("max_length") or 0)
            if options.get("padding")
            else 0
        )
        most = sum(
            max(TOKENS_PER_CHARACTER * sum(map(len, row)), padded) + MORE_TOKENS
            for row in zip(*columns, strict=True)
        )
        head, data = self._process.ask(request, most)
        found = self._cut(head, data, len(columns[0]))
        rows = found if many else {name: of_texts[0] for name, of_texts in found.items()}
        return _tensors(rows) if return_tensors == "pt" else rows

    def _cut(self, head: dict[str, Any], data: bytes, texts: int) -> dict[str, Any]:
        """Split the numbers of an answer into arrays and texts, after checking that they fit."""
        # The process is not trusted: check that the parts of the answer fit together.
        numbers = np.frombuffer(data, np.int32)
        names = head.get("names")
        lengths = head.get("lengths")
        if not (
            isinstance(names, list)
            and isinstance(lengths, list)
            and all(name in ARRAYS for name in names)
            and len(lengths) == texts
        ):
            raise self._process.fault("gave an answer to another question")
        if not all(type(length) is int and length >= 0 for length in lengths):
            raise self._process.fault("answered with invalid lengths")
        widths = [2 if name == "offset_mapping" else 1 for name in names]
        if (
            len(numbers) != sum(widths) * sum(lengths)
            or len(set(names)) < len(names)
            or "input_ids" not in names
        ):
            raise self._process.fault("answered with another number of tokens than it announced")
        found = dict[str, Any]()
        place = 0
        for name, width in zip(names, widths, strict=True):
            found[name] = []
            for length in lengths:
                row = numbers[place : place + width * length].tolist()
                place += width * length
                found[name].append(
                    row if width == 1 else list(zip(row[::2], row[1::2], strict=True))
                )
        return found


class TokenizerProcess:
    """Handle of the tokenizer process.

    The process starts with the first request, and restarts with the next request after it ended.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[..., Any] | None = None

    def ask(self, request: dict[str, Any], max_tokens: int) -> tuple[dict[str, Any], bytes]:
        """Send a request and return the head and the numbers of the answer.

        The answer may hold up to four int32 numbers per token: id, mask and two offsets.

        Parameters
        ----------
        request : JSON values
        most_tokens : maximum number of tokens of the answer

        Raises
        ------
        InputError
            The process ended, could not answer the request, or returned too much.
        """
        line = json.dumps(request).encode() + b"\n"
        texts = sum(map(len, request.get("texts", ())))
        with self._lock:
            process = self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(line)
                process.stdin.flush()
                lengths = process.stdout.read(LENGTHS.size)
                if len(lengths) < LENGTHS.size:
                    raise BrokenPipeError
                of_head, of_data = LENGTHS.unpack(lengths)
                if (
                    of_head > MAX_HEAD + HEAD_PER_TEXT * texts
                    or of_data > 4 * 4 * max_tokens
                    or of_data % 4
                ):
                    raise self.fault("made more tokens than any tokenizer makes from such a text")
                head = read_json(process.stdout.read(of_head))
                data = process.stdout.read(of_data)
                if len(data) < of_data:
                    raise BrokenPipeError
            except (BrokenPipeError, ValueError) as error:
                if isinstance(error, EspalierError):
                    raise
                raise self.fault(_why(self._stop(DYING_SECONDS))) from None
        if not isinstance(head, dict) or "error" in head:
            raise self.fault(
                "cannot be used"
                f" ({str(head['error'])[:64] if isinstance(head, dict) else 'no answer'})"
            )
        # A InputError is answered with its text; other errors only with their type.
        if "input_error" in head:
            self._stop()
            # The local path tells the user nothing about the server's model.
            reason = str(head["input_error"]).replace(f"{self._directory}/", "")
            raise InputError(f"the model that the run's server sent: {reason}")
        return head, data

    def fault(self, what: str) -> EspalierError:
        """End the process and return an error that describes what the tokenizer did."""
        self._stop()
        return InputError(
            f"the tokenizer that the run's server sent {what}; the run needs another model"
        )

    def _running(self) -> "subprocess.Popen[bytes]":
        if self._process is None or self._process.poll() is not None:
            self._stop()
            # In a Flower run, the app is imported from a folder on sys.path.
            path = os.pathsep.join(entry for entry in sys.path if entry)
            self._process = subprocess.Popen(
                command(self._directory),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={
                    **os.environ,
                    "PYTHONPATH": path,
                    # The tokenizer must not download anything.
                    "HF_HUB_OFFLINE": "1",
                    "TOKENIZERS_PARALLELISM": "false",
                },
            )
            self._end = weakref.finalize(self, _end, self._process)
        return self._process

    def _stop(self, seconds: float = 0.0) -> int:
        """Kill the process after up to ``seconds`` to exit by itself, and return its exit code."""
        process = self._process
        self._process = None
        if process is not None and seconds:
            with suppress(subprocess.TimeoutExpired):
                process.wait(seconds)
        if self._end is not None:
            self._end()
        return 0 if process is None else process.returncode


def command(directory: Path) -> list[str]:
    """Return the command that starts the process."""
    # -P keeps the current directory out of sys.path.
    return [sys.executable, "-P", "-m", tokenizer_process.__name__, str(directory)]


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process and close its pipes."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.kill()
    process.wait()
    with suppress(OSError):
        process.stdin.close()
    process.stdout.close()


def _why(returncode: int) -> str:
    if returncode == -signal.SIGXCPU:
        return (
            f"took more processor time than a site allows ({tokenizer_process.REQUEST_SECONDS}"
            " s, and more for long texts)"
        )
    most = f"{tokenizer_process.MEMORY >> 30} GiB"
    return f"ended its process ({returncode}); it may have needed more than its {most} of memory"


def _tensors(rows: dict[str, Any]) -> dict[str, Any]:
    with importing():
        import torch
    return {name: torch.tensor(of_texts, dtype=torch.int64) for name, of_texts in rows.items()}
