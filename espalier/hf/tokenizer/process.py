"""The process that a downloaded tokenizer runs in: it loads the tokenizer, and answers one request after the other.

A request is a line of JSON; an answer is two lengths, a head in JSON, and token ids, masks and offsets as int32. With each
request it may use some seconds of processor time, and it has a fixed amount of memory beyond what its libraries take; the
kernel ends it when it uses more. It writes no files. It ends when its standard input does.
"""

import json
import os
import resource
import struct
import sys
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

MEMORY = 4 << 30
"""Bytes that tokenizer and texts may take; of address space, of which allocators take more than they use."""
LOADING_SECONDS = 180
"""Seconds of processor time for loading, libraries included; the largest vocabularies take 20."""
REQUEST_SECONDS = 30
CHARACTERS_PER_SECOND = 10_000
"""Seconds of processor time for a request, and characters for each second more."""
LENGTHS = struct.Struct("<QQ")
ARRAYS = ("input_ids", "attention_mask", "offset_mapping")


def allow_seconds(seconds: int) -> None:
    """Let this process use so much processor time more; then the kernel ends it."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    most = int(used.ru_utime + used.ru_stime) + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (most, resource.RLIM_INFINITY))


def limit_memory() -> None:
    """Let this process take ``MEMORY`` bytes more than it has, and write no files."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY
    before = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = most if before == resource.RLIM_INFINITY else min(most, before)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def load(directory: Path) -> Any:
    """Load the tokenizer of a directory, whose parts are checked before and afterwards.

    Raises
    ------
    Mistake
        It has parts that are not allowed.
    """
    from transformers import AutoTokenizer

    from espalier.environment.bounded_json import read_json
    from espalier.hf.families import has_own_code
    from espalier.hf.tokenizer.rules import require_known_parts, require_known_tokenizer

    limit_memory()
    config = read_json((directory / "config.json").read_bytes())
    require_known_tokenizer(directory)
    if has_own_code(config):  # so that transformers knows the classes of a smaller model
        from espalier.hf.structured.configuration import build_config

        build_config(config)
    tokenizer = AutoTokenizer.from_pretrained(
        directory, local_files_only=True, trust_remote_code=False
    )
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        require_known_parts(read_json(backend.to_str()), "the tokenizer")
    return tokenizer


def facts_of(tokenizer: Any) -> dict[str, Any]:
    """Properties of a tokenizer that are asked for in addition to encodings."""
    return {
        "num_tokens": 1 + max(tokenizer.get_vocab().values(), default=-1),
        "length": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "all_special_ids": list(tokenizer.all_special_ids),
    }


def answer(tokenizer: Any, request: dict[str, Any]) -> tuple[dict[str, Any], list[list[int]]]:
    """Return the head and the rows of the answer to a request."""
    if request["what"] == "facts":
        return facts_of(tokenizer), []
    if request["what"] == "decode":
        return {"text": tokenizer.decode(request["ids"])}, []
    texts = request["texts"]
    encoded = tokenizer(
        *(texts if request["many"] else [column[0] for column in texts]), **request["options"]
    )
    names = [name for name in ARRAYS if name in encoded]
    rows = [
        list(map(_flat, encoded[name] if request["many"] else [encoded[name]])) for name in names
    ]
    return {"names": names, "lengths": [len(row) for row in rows[0]]}, list(chain(*rows))


def _flat(row: list[Any]) -> list[int]:
    return (
        [number for pair in row for number in pair]
        if row and isinstance(row[0], tuple | list)
        else row
    )


def _write(answers: BinaryIO, head: dict[str, Any], rows: list[list[int]]) -> None:
    text = json.dumps(head).encode()
    data = np.fromiter(chain(*rows), np.int32).tobytes()
    answers.write(LENGTHS.pack(len(text), len(data)) + text + data)
    answers.flush()


def serve(directory: Path, requests: BinaryIO, answers: BinaryIO) -> None:
    """Load the tokenizer and answer requests until there are no more; an error is an answer, by its type, and ends this."""
    from espalier.errors import INTERRUPTS, Mistake

    tokenizer = None
    allow_seconds(LOADING_SECONDS)
    for line in requests:
        try:
            request = json.loads(line)
            if tokenizer is None:
                tokenizer = load(directory)
            allow_seconds(REQUEST_SECONDS + len(line) // CHARACTERS_PER_SECOND)
            head, rows = answer(tokenizer, request)
        except INTERRUPTS:
            raise
        except Mistake as mistake:
            head = {"mistake": str(mistake)[:1000]}
            rows = []
        except BaseException as error:
            head = {"error": type(error).__name__}
            rows = []
        _write(answers, head, rows)
        if "mistake" in head or "error" in head:
            return


if __name__ == "__main__":
    own = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints is no answer
    serve(Path(sys.argv[1]), sys.stdin.buffer, own)
