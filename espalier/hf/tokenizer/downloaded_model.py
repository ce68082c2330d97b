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
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

from espalier.environment.bounded_json import MAX_CHARACTERS, read_json
from espalier.environment.imports import importing
from espalier.errors import EspalierError, InputError
from espalier.hf.files.unchanged_files import cached_while_unchanged
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.tokenizer import process as tokenizer_process
from espalier.hf.tokenizer.chat import ChatTokens, Message
from espalier.hf.tokenizer.process import NUMBERS_PER_TOKEN

MAX_ANSWER = 1 << 20
BYTES_PER_TOKEN = 32
"""Maximum size of an answer in bytes: ``MAX_ANSWER``, plus this number per token."""
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
        return _tokenizer_in_process(self.directory)

    @property
    def num_tokens(self) -> int:
        """Highest token id of the tokenizer, plus 1."""
        return int(self.tokenizer.facts["num_tokens"])


@cached_while_unchanged(2)
def open_downloaded(directory: Path) -> DownloadedModel:
    """Open a model that a server sent.

    Within a process, callers share the same model as long as the files do not change.

    Raises
    ------
    InputError
        See ``OpenedModel``.
    """
    return DownloadedModel(directory)


@cached_while_unchanged(2)
def _tokenizer_in_process(directory: Path) -> "ProcessTokenizer":
    return ProcessTokenizer(directory)


class ProcessTokenizer:
    """Tokenizer in another process, with those methods of Hugging Face that clients use.

    The process starts with the first request, and restarts with the next request after it ended.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[..., Any] | None = None

    @cached_property
    def facts(self) -> dict[str, Any]:
        """Properties of the tokenizer, such as the number of tokens."""
        # The process is not trusted, so its facts are checked like its other answers.
        facts = self._ask({"what": "facts"}, 0)
        special = facts.get("all_special_ids")
        numbers = [facts.get("num_tokens"), facts.get("length")]
        ends = [facts.get("eos_token_id"), facts.get("pad_token_id")]
        numbers += [end for end in ends if end is not None]
        if not (_is_row(special) and _is_row(numbers)):
            raise self._fault("has properties that no tokenizer has")
        return facts

    @property
    def eos_token_id(self) -> int | None:
        """Token id that ends a text."""
        return self.facts.get("eos_token_id")

    @property
    def pad_token_id(self) -> int | None:
        """Token id for padding."""
        return self.facts.get("pad_token_id")

    @property
    def all_special_ids(self) -> list[int]:
        """Token ids that stand for no text."""
        return list(self.facts["all_special_ids"])

    def __len__(self) -> int:
        return int(self.facts["length"])

    def encode(self, text: str, **options: Any) -> list[int]:
        """Return the token ids of a text."""
        token_ids: list[int] = self(text, **options)["input_ids"]
        return token_ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of some token ids."""
        text = self._ask({"what": "decode", "ids": list(ids)}, 0).get("text")
        if not isinstance(text, str) or len(text) > MAX_DECODED:
            raise self._fault("made more of a token than any tokenizer does")
        return text

    def encode_chat(
        self, messages: Sequence[Message], first: int, template: str | None
    ) -> list[ChatTokens]:
        """Return the training sequences of a conversation, see ``chat.encode_chat``."""
        characters = sum(len(role) + len(content) for role, content in messages)
        # Each message may begin a sequence, which is at most as long as the conversation.
        max_tokens = len(messages) * (TOKENS_PER_CHARACTER * characters + MORE_TOKENS)
        request = {"what": "chat", "messages": messages, "first": first, "template": template}
        answer = self._ask(request, max_tokens)
        ids: Any = answer.get("ids")
        spans: Any = answer.get("spans")
        # The process is not trusted.
        if not (
            isinstance(ids, list)
            and isinstance(spans, list)
            and len(ids) == len(spans)
            and all(map(_is_row, ids))
            and all(map(_is_row, spans))
            and all(
                _are_spans(edges, len(token_ids))
                for token_ids, edges in zip(ids, spans, strict=True)
            )
        ):
            raise self._fault("returned a reply that does not match the request")
        return [
            ChatTokens(tuple(token_ids), tuple(zip(edges[::2], edges[1::2], strict=True)))
            for token_ids, edges in zip(ids, spans, strict=True)
        ]

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
        columns = [
            [column] if isinstance(column, str) else list(column)
            for column in (texts, pairs)
            if column is not None
        ]
        lengths = [sum(map(len, row)) for row in zip(*columns, strict=True)]
        padded = 0
        if options.get("padding"):
            # Padding makes every row as long as the longest one.
            longest = max(lengths, default=0)
            padded = max(longest * TOKENS_PER_CHARACTER, options.get("max_length") or 0)
        max_tokens = sum(
            max(TOKENS_PER_CHARACTER * length, padded) + MORE_TOKENS for length in lengths
        )
        request = {"what": "encode", "texts": columns, "options": options}
        encoded = self._rows(self._ask(request, max_tokens), len(lengths))
        if isinstance(texts, str):
            encoded = {name: rows[0] for name, rows in encoded.items()}
        if return_tensors != "pt":
            return encoded
        with importing():
            import torch
        return {name: torch.tensor(rows, dtype=torch.int64) for name, rows in encoded.items()}

    def _rows(self, answer: dict[str, Any], texts: int) -> dict[str, Any]:
        """Return the rows of numbers of an answer, after checking that they fit together."""
        encoded = dict[str, Any]()
        ids: Any = answer.get("input_ids")
        for name, width in NUMBERS_PER_TOKEN.items():
            if name != "input_ids" and name not in answer:
                continue
            rows = answer.get(name)
            # The process is not trusted.
            if not (
                isinstance(rows, list)
                and len(rows) == texts
                and all(map(_is_row, rows))
                and all(
                    len(row) == width * len(row_ids) for row, row_ids in zip(rows, ids, strict=True)
                )
            ):
                raise self._fault("returned a reply that does not match the request")
            # Offsets are flat in the answer: start and end of each token.
            if width == 2:
                rows = [list(zip(row[::2], row[1::2], strict=True)) for row in rows]
            encoded[name] = rows
        return encoded

    def _ask(self, request: dict[str, Any], max_tokens: int) -> dict[str, Any]:
        """Send a request and return the answer, which is about ``max_tokens`` tokens at most.

        Raises InputError if the process ended, could not answer the request, or returned too much.
        """
        # A limit on the answer, so that the process cannot fill this one's memory.
        max_bytes = min(MAX_ANSWER + BYTES_PER_TOKEN * max_tokens, MAX_CHARACTERS)
        with self._lock:
            process = self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            # An empty line stands for a process that has died.
            line = b""
            with suppress(BrokenPipeError):
                process.stdin.write(json.dumps(request).encode() + b"\n")
                process.stdin.flush()
                line = process.stdout.readline(max_bytes)
            # A full buffer means that the line goes on beyond the limit.
            if len(line) == max_bytes:
                raise self._fault("made more tokens than any tokenizer makes from such a text")
            if not line.endswith(b"\n"):
                raise self._fault(_why(self._stop(DYING_SECONDS)))
        try:
            answer = read_json(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise self._fault("cannot be used (no answer)")
        if "error" in answer:
            raise self._fault(f"cannot be used ({str(answer['error'])[:64]})")
        # An InputError is answered with its text; other errors only with their type.
        if "input_error" in answer:
            self._stop()
            # The local path tells the user nothing about the server's model.
            reason = str(answer["input_error"]).replace(f"{self._directory}/", "")
            raise InputError(f"the model that the run's server sent: {reason}")
        return answer

    def _fault(self, what: str) -> EspalierError:
        """End the process and return an error that describes what the tokenizer did."""
        self._stop()
        return InputError(
            f"the tokenizer that the run's server sent {what}; the run needs another model"
        )

    def _running(self) -> "subprocess.Popen[bytes]":
        if self._process is None or self._process.poll() is not None:
            # The old process is reaped before a new one starts.
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
            # Ends with this object, also at the exit of the interpreter.
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
    limit = f"{tokenizer_process.MEMORY >> 30} GiB"
    return f"ended its process ({returncode}); it may have needed more than its {limit} of memory"


def _is_row(row: Any) -> bool:
    """Return whether a value is a list of integers of 32 bits."""
    # ``bool`` is an ``int`` too, and must not pass as a number.
    return isinstance(row, list) and all(
        type(number) is int and abs(number) < 1 << 31 for number in row
    )


def _are_spans(edges: list[int], length: int) -> bool:
    """Return whether numbers are start and end of spans, in order, within a length."""
    return len(edges) % 2 == 0 and all(
        # Each edge lies between its neighbours.
        0 <= before <= after <= length
        for before, after in zip([0, *edges], [*edges, length], strict=True)
    )
