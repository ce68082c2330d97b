"""A downloaded tokenizer in a restricted process gives the results of the tokenizer itself."""

import io
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from espalier.errors import EspalierError
from espalier.hf.opening.base_check import require_within_limits
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.tokenizer import downloaded_model
from espalier.hf.tokenizer import process as tokenizer_process
from espalier.hf.tokenizer.downloaded_model import (
    DownloadedModel,
    ProcessTokenizer,
    open_downloaded,
)
from espalier.settings.run import parse
from espalier.settings.tables.task import CHAT_TEMPLATES
from tests.tiny_model import WORDS, save_tiny_llama

TEXTS = [
    "",
    "a",
    " ".join(WORDS),
    "two\n\nlines  and blanks ",
    "äöü 日本 \U0001f600",
    "<s> not special",
    "x" * 3000,
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model whose tokenizer prepends a special token to each text and has a padding token."""
    folder = save_tiny_llama(tmp_path_factory.mktemp("model") / "base")
    path = folder / "tokenizer.json"
    document = json.loads(path.read_text())
    template = {
        "single": [
            {"SpecialToken": {"id": "<s>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ]
    }
    template["pair"] = [*template["single"], {"Sequence": {"id": "B", "type_id": 1}}]
    tokens = {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}}
    document["post_processor"] = {
        "type": "TemplateProcessing",
        **template,
        "special_tokens": tokens,
    }
    path.write_text(json.dumps(document))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps(settings | {"pad_token": "<s>", "eos_token": "<s>"})
    )
    return folder


@pytest.fixture(scope="module")
def model(directory: Path) -> DownloadedModel:
    return open_downloaded(directory)


@pytest.fixture(scope="module")
def plain(directory: Path) -> Any:
    return AutoTokenizer.from_pretrained(directory)


# ----- results ------------------------------------------------------------------------------------


def test_token_ids_equal_the_tokenizer_s_own(
    model: DownloadedModel, plain: Any, directory: Path
) -> None:
    for text in TEXTS:
        assert model.tokenizer.encode(text) == plain.encode(text) == model.encode(text)
        assert model.tokenizer.encode(text, add_special_tokens=False) == plain.encode(
            text, add_special_tokens=False
        )
    assert model.encode(TEXTS[2])[0] == 0
    assert model.tokenizer(TEXTS)["input_ids"] == plain(TEXTS)["input_ids"]
    offsets = model.tokenizer(TEXTS[4], return_offsets_mapping=True)["offset_mapping"]
    assert offsets == plain(TEXTS[4], return_offsets_mapping=True)["offset_mapping"]
    assert open_downloaded(directory) is model


def test_conversations_equal_the_tokenizer_s_own(model: DownloadedModel, directory: Path) -> None:
    """Also texts that a template renders per answer, and errors of a template."""
    messages = [("user", TEXTS[4]), ("assistant", "elm"), ("user", "a"), ("assistant", TEXTS[2])]
    forgetful = (
        "{% for m in messages %}{% if loop.last and m['role'] == 'assistant' %}!{% endif %}"
        "{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}!{% endif %}"
    )
    for template in (CHAT_TEMPLATES["chatml"], forgetful):
        for first in (0, 2):
            expected = OpenedModel(directory).encode_chat(messages, first, template)
            assert model.encode_chat(messages, first, template) == expected
    with pytest.raises(EspalierError, match="no chat template"):
        model.encode_chat(messages, 0, None)
    with pytest.raises(EspalierError, match="fails on a conversation"):
        model.encode_chat(messages, 0, "{{ 1 + messages[0]['content'] }}")


@pytest.mark.parametrize("spans", [[[0]], [[1, 0]], [[0, 9]], [[-1, 1]], [], [["0", 1]]])
def test_wrong_spans_are_refused(
    directory: Path, spans: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = ProcessTokenizer(directory)
    monkeypatch.setattr(tokenizer, "_ask", lambda *_: {"ids": [[1, 2]], "spans": spans})
    with pytest.raises(EspalierError, match="does not match the request"):
        tokenizer.encode_chat([("user", "a"), ("assistant", "b")], 0, None)


def test_batches_equal_the_tokenizer_s_own(model: DownloadedModel, plain: Any) -> None:
    options = {
        "truncation": True,
        "max_length": 40,
        "padding": True,
        "padding_side": "right",
        "return_tensors": "pt",
    }
    for columns in ([TEXTS], [TEXTS, TEXTS[::-1]]):
        ours, theirs = (tokenizer(*columns, **options) for tokenizer in (model.tokenizer, plain))
        for name in ("input_ids", "attention_mask"):
            assert torch.equal(ours[name], theirs[name])
            assert ours[name].dtype == theirs[name].dtype


def test_what_else_is_asked_of_it(model: DownloadedModel, plain: Any, directory: Path) -> None:
    ours = model.tokenizer
    assert (ours.eos_token_id, ours.pad_token_id, ours.all_special_ids) == (
        0,
        0,
        plain.all_special_ids,
    )
    assert len(ours) == len(plain)
    assert ours.decode([70, 71]) == plain.decode([70, 71])
    assert (
        model.num_tokens == OpenedModel(directory).num_tokens == 1 + max(plain.get_vocab().values())
    )
    require_within_limits(
        parse({"method": "fedsoda", "data.sequence-length": 16, "evaluation.sequence-length": 16}),
        model,
    )


def test_it_is_started_again_where_it_ended(model: DownloadedModel, plain: Any) -> None:
    """The process is started again after another process killed it."""
    process = model.tokenizer._process
    process.kill()
    process.wait()
    assert model.tokenizer.encode("again") == plain.encode("again")
    assert model.tokenizer._process.pid != process.pid


def test_file_with_other_parts_is_refused(directory: Path, tmp_path: Path) -> None:
    """Nothing of the file is loaded: matching this pattern would take exponential time."""
    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    document = json.loads((tmp_path / "tokenizer.json").read_text())
    document["normalizer"] = {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "b"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(
        EspalierError,
        match=r"sent: tokenizer\.json: normalizer: a regular expression is not that of",
    ):
        open_downloaded(tmp_path).encode("a" * 100 + "!")


# ----- faults of the process ----------------------------------------------------------------------

HEAD = "import os, sys, time\nfrom espalier.hf.tokenizer.process import *\n"


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """Return a function that makes a tokenizer whose process runs the given script."""
    made = list[ProcessTokenizer]()

    def tokenizer(script: str) -> ProcessTokenizer:
        monkeypatch.setattr(
            downloaded_model, "command", lambda _: [sys.executable, "-c", HEAD + script]
        )
        made.append(ProcessTokenizer(tmp_path))
        return made[-1]

    yield tokenizer
    for one in made:
        one._stop()


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("allow_seconds(1)\nwhile True: pass", "took more processor time than a site allows"),
        (
            (
                "import espalier.hf.tokenizer.process as p\np.MEMORY = 1 <<"
                " 28\np.limit_memory()\nx = bytes(1 << 29)"
            ),
            "memory",
        ),
        ("sys.exit(3)", r"ended its process \(3\)"),
        ("os.abort()", r"ended its process \(-6\)"),
        ("print('x' * (1 << 22)); time.sleep(600)", "more tokens than any"),
        ("print('[' * 9, end='')", "ended its process"),
        ("print('{')", "no answer"),
        ("print('[]')", "no answer"),
        ("print('{}')", "returned a reply that does not match the request"),
    ],
)
def test_failed_process_is_told_in_a_sentence(pretended: Any, script: str, words: str) -> None:
    tokenizer = pretended(script)
    with pytest.raises(EspalierError, match=words) as caught:
        tokenizer.encode("a private word")
    assert "private" not in str(caught.value)
    assert str(caught.value).endswith("the run needs another model")
    assert tokenizer._process is None


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"input_ids": [["x"]]},
        {"input_ids": [[1.5]]},
        {"input_ids": [[1 << 40]]},
        {"input_ids": [[1]] * 2},
        {"input_ids": [[1, 2]], "attention_mask": [[1]]},
        {"input_ids": [[1]], "offset_mapping": [[1]]},
    ],
)
def test_numbers_that_do_not_fit_are_refused(pretended: Any, answer: dict[str, Any]) -> None:
    with pytest.raises(
        EspalierError, match="sent returned a reply that does not match the request"
    ):
        pretended(f"print({json.dumps(answer)!r})").encode("text")


def test_facts_are_numbers(pretended: Any) -> None:
    answer = json.dumps({"num_tokens": "9", "length": 9, "all_special_ids": []})
    with pytest.raises(EspalierError, match="has properties that no tokenizer has"):
        len(pretended(f"print({answer!r})"))


# ----- the process itself -------------------------------------------------------------------------


class PanicException(BaseException):
    """Exception of the tokenizers library when it panics."""


@pytest.mark.parametrize(
    "error",
    [PanicException("a private word"), MemoryError(), KeyError("a private word"), RecursionError()],
)
def test_error_is_answered_by_its_type(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def broken(_: Path) -> Any:
        raise error

    monkeypatch.setattr(tokenizer_process, "load", broken)
    monkeypatch.setattr(tokenizer_process, "allow_seconds", lambda _: None)
    answers = io.BytesIO()
    tokenizer_process.serve(Path(), io.BytesIO(b'{"what": "facts"}\n' * 2), answers)
    assert json.loads(answers.getvalue()) == {"error": type(error).__name__}


def test_it_writes_no_files_and_holds_its_limits(tmp_path: Path) -> None:
    script = (
        HEAD + "import espalier.hf.tokenizer.process as p\np.limit_memory(); p.allow_seconds(7)\n"
        "used, hard = resource.getrlimit(resource.RLIMIT_CPU)\n"
        "assert 7 <= used <= 30 and hard == resource.RLIM_INFINITY\n"
        "assert p.MEMORY < resource.getrlimit(resource.RLIMIT_AS)[0] < 2 * p.MEMORY\n"
        "try:\n    open(sys.argv[1], 'w').write('x' * 10_000)\nexcept OSError: print('refused')\n"
    )
    import subprocess

    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "x")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "refused" in done.stdout, done.stderr
    assert os.path.getsize(tmp_path / "x") == 0
