"""Process of a downloaded tokenizer: it loads the tokenizer and answers requests one by one.

A request is a line of JSON, and so is its answer.

Covers: each request may use a limited number of seconds of CPU time, and the process may use a
fixed amount of memory in addition to its libraries. The kernel kills a process that uses more time,
and refuses it more memory. The process writes no files, and it ends when its standard input ends.
"""

import json
import os
import resource
import sys
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

MEMORY = 4 << 30
"""Bytes of address space for tokenizer and texts; allocators reserve more than they use."""
LOADING_SECONDS = 180
"""Seconds of CPU time for loading, including libraries; the largest vocabularies take 20."""
REQUEST_SECONDS = 30
CHARACTERS_PER_SECOND = 10_000
"""Characters of a request per second of CPU time in addition to ``REQUEST_SECONDS``."""
NUMBERS_PER_TOKEN = {"input_ids": 1, "attention_mask": 1, "offset_mapping": 2}
"""Parts of an encoding that are answered, each as a flat row of numbers per text."""


def allow_seconds(seconds: int) -> None:
    """Allow this process more CPU time; the kernel kills it afterwards."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    # Limits count from the start of the process.
    limit = int(usage.ru_utime + usage.ru_stime) + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))


def limit_memory() -> None:
    """Allow this process ``MEMORY`` more bytes of address space, and forbid writing files."""
    # Address space in use now, for instance by libraries.
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    # A process cannot raise its own hard limit.
    hard_limit = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = limit if hard_limit == resource.RLIM_INFINITY else min(limit, hard_limit)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    # A limit of 0 bytes: the process cannot write a file.
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def load(directory: Path) -> Any:
    """Load the tokenizer of a directory, and check its components before and after.

    Raises InputError if a component is not allowed.
    """
    from transformers import AutoTokenizer

    from espalier.environment.bounded_json import read_json
    from espalier.hf.families import has_own_code
    from espalier.hf.tokenizer.files import own_configuration
    from espalier.hf.tokenizer.rules import require_known_parts, require_known_tokenizer

    limit_memory()
    config = read_json((directory / "config.json").read_bytes())
    # Before the library reads the files: some components have no limit on what they compute.
    require_known_tokenizer(directory)
    # This registers the classes of a pruned model with transformers.
    if has_own_code(config):
        from espalier.hf.structured.configuration import build_config

        build_config(config)
    tokenizer = AutoTokenizer.from_pretrained(
        directory, local_files_only=True, trust_remote_code=False, **own_configuration(directory)
    )
    # transformers may have built another tokenizer than the file describes.
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        require_known_parts(read_json(backend.to_str()), "the tokenizer")
    return tokenizer


def answer(tokenizer: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to a request."""
    from espalier.hf.tokenizer.chat import encode_chat

    if request["what"] == "facts":
        return {
            "num_tokens": 1 + max(tokenizer.get_vocab().values(), default=-1),
            "length": len(tokenizer),
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            "all_special_ids": list(tokenizer.all_special_ids),
        }
    if request["what"] == "decode":
        return {"text": tokenizer.decode(request["ids"])}
    if request["what"] == "chat":
        sequences = encode_chat(
            tokenizer, request["messages"], request["first"], request["template"]
        )
        return {"ids": [sequence.token_ids for sequence in sequences],
                "spans": [list(chain(*sequence.spans)) for sequence in sequences]}  # fmt: skip
    encoded = tokenizer(*request["texts"], **request["options"])
    numbers = {name: encoded[name] for name in NUMBERS_PER_TOKEN if name in encoded}
    if "offset_mapping" in numbers:
        # Pairs of numbers become numbers.
        numbers["offset_mapping"] = [list(chain(*row)) for row in numbers["offset_mapping"]]
    return numbers


def serve(directory: Path, requests: BinaryIO, answers: BinaryIO) -> None:
    """Load the tokenizer and answer requests until there are no more.

    An error is answered with its type, and ends the loop.
    """
    from espalier.errors import INTERRUPTS, EspalierError

    tokenizer = None
    allow_seconds(LOADING_SECONDS)
    for line in requests:
        try:
            request = json.loads(line)
            # Loading belongs to the first request, so that its errors are answered too.
            if tokenizer is None:
                tokenizer = load(directory)
            # Long texts get more time.
            allow_seconds(REQUEST_SECONDS + len(line) // CHARACTERS_PER_SECOND)
            reply = answer(tokenizer, request)
        except INTERRUPTS:
            raise
        except EspalierError as error:
            reply = {"input_error": str(error)[:1000]}
        except BaseException as error:
            # The type only: a message may quote the text.
            reply = {"error": type(error).__name__}
        answers.write(json.dumps(reply, separators=(",", ":")).encode() + b"\n")
        answers.flush()
        # After an error the state of the tokenizer is unknown.
        if "input_error" in reply or "error" in reply:
            return


if __name__ == "__main__":
    own = os.fdopen(os.dup(1), "wb")
    # Output that a library prints goes to stderr, so that it cannot be part of an answer.
    os.dup2(2, 1)
    serve(Path(sys.argv[1]), sys.stdin.buffer, own)
