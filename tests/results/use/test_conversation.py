"""Conversation with tiny models: prompts, memory, streaming, and the command."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from espalier.errors import InputError
from espalier.results.use.chat_command import Screen, main
from espalier.results.use.conversation import Answering, Conversation
from tests.results.use.saved_run import save_run
from tests.tiny_model import save_tiny_llama

TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny_llama(tmp_path / "base", dtype=torch.float32, positions=256)


def opened(folder: Path, template: str | None = TEMPLATE, **options: Any) -> Conversation:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    return Conversation("result", model, tokenizer, Answering(max_new_tokens=5, **options))


def greedy(talk: Conversation, text: str, steps: int = 5) -> str:
    """Return the most likely continuation of a text, token by token and without a cache."""
    ids = talk.tokenizer(text, return_tensors="pt")["input_ids"]
    length = ids.shape[1]
    with torch.no_grad():
        for _ in range(steps):
            following = talk.model(ids, use_cache=False).logits[0, -1].argmax()
            ids = torch.cat([ids, following.reshape(1, 1)], dim=1)
    written: str = talk.tokenizer.decode(ids[0, length:], skip_special_tokens=True)
    return written


def test_answer_continues_the_chat_template(folder: Path) -> None:
    talk = opened(folder, system="be brief")
    pieces: list[str] = []
    assert talk.answer("oak", pieces.append) == 0
    first = "".join(pieces)
    before = "[system]be brief[user]oak[assistant]"
    assert first == greedy(talk, before)
    pieces.clear()
    talk.answer("fir", pieces.append)
    assert "".join(pieces) == greedy(talk, f"{before}{first}[user]fir[assistant]")
    assert talk.turns == [("oak", first), ("fir", "".join(pieces))]


def test_text_is_continued_without_a_template(folder: Path) -> None:
    talk = opened(folder, template=None)
    first: list[str] = []
    talk.answer("oak", first.append)
    assert "".join(first) == greedy(talk, "oak")
    second: list[str] = []
    talk.answer("fir", second.append)
    assert "".join(second) == greedy(talk, f"oak{''.join(first)}\nfir")
    with pytest.raises(InputError, match=r"--system: the tokenizer has no chat template"):
        opened(folder, template=None, system="be brief")


def test_oldest_turns_are_left_out(folder: Path) -> None:
    """The model reads 256 tokens, of which 5 are the answer's; a word has one or more."""
    talk = opened(folder, template=None)
    talk.turns = [("oak " * 250, ""), ("elder " * 3, ""), ("ivy", "")]
    assert talk.answer("fir", lambda _: None) == 1
    assert [said for said, _ in talk.turns] == ["elder " * 3, "ivy", "fir"]
    with pytest.raises(InputError, match=r"the text has \d+ tokens, but the model reads 256"):
        talk.answer("oak " * 256, lambda _: None)
    assert len(talk.turns) == 3


def test_interrupt_ends_only_the_answer(folder: Path) -> None:
    talk = opened(folder, template=None)

    def interrupt(_: str) -> None:
        raise KeyboardInterrupt

    talk.answer("oak", interrupt)
    ((said, answer),) = talk.turns
    assert said == "oak"
    assert answer
    assert greedy(talk, "oak").startswith(answer)


def test_a_template_that_refuses_is_told(folder: Path) -> None:
    talk = opened(folder, template="{{ raise_exception('no system message') }}")
    with pytest.raises(InputError, match=r"the chat template refuses .*: no system message"):
        talk.answer("oak", lambda _: None)


def test_random_answers_repeat_with_the_seed(folder: Path) -> None:
    answers = []
    for seed in (1, 1, 2, 3):
        torch.manual_seed(seed)
        talk = opened(folder, temperature=5.0)
        talk.answer("oak", lambda _: None)
        answers.append(talk.turns[0][1])
    assert answers[0] == answers[1]
    assert len(set(answers)) > 1


# ----- command ------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path, folder: Path) -> Path:
    """Run with a model that differs from its base and has a chat template; the base has none."""
    path = save_run(tmp_path / "run", str(folder))
    save_tiny_llama(path / "model", seed=5, dtype=torch.float32)
    (path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    return path


def document(run: Path, **changes: Any) -> dict[str, Any]:
    return {
        "run": str(run), "client": None, "base": None, "compare": False, "device": "cpu",
        "prompt": None, "system": None, "max_new_tokens": 5, "temperature": 0.0, "seed": 0,
    } | changes  # fmt: skip


def expected(folder: Path, text: str) -> str:
    return greedy(opened(folder, None), text)


def test_one_prompt_is_answered_alone(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(document(run, prompt="oak")) == 0
    assert capsys.readouterr().out == f"{expected(run / 'model', '[user]oak[assistant]')}\n"


def test_comparison_in_a_pipe(run: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(document(run, prompt="oak", compare=True)) == 0
    base = expected(folder, "oak")
    result = expected(run / "model", "[user]oak[assistant]")
    assert capsys.readouterr().out == f"base:\n{base}\nresult:\n{result}\n"


def test_comparison_on_a_terminal_has_two_columns() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=60, color_system=None)
    screen = Screen(console, ["base", "result"])
    with screen.turn():
        for name, text in (("base", "birch"), ("result", "cedar")):
            with screen.answer(name) as write:
                write(text)
    lines = file.getvalue().splitlines()
    assert any("base" in line and "result" in line for line in lines)
    assert any("birch" in line and "cedar" in line for line in lines)


def test_turns_from_standard_input(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("oak\n\nfir\n/clear\noak\n/quit\nivy\n"))
    assert main(document(run)) == 0
    out, err = capsys.readouterr()
    first = expected(run / "model", "[user]oak[assistant]")
    second = expected(run / "model", f"[user]oak[assistant]{first}[user]fir[assistant]")
    assert out == f"{first}\n{second}\n{first}\n"
    assert "the conversation begins again" in err


def test_missing_template_is_said(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "model" / "chat_template.jinja").unlink()
    assert main(document(run, prompt="oak")) == 0
    assert "has no chat template; the model continues your text" in capsys.readouterr().err
    assert main(document(run, prompt="oak", system="x")) == 2
    assert "leave out the system message" in capsys.readouterr().err


def test_wrong_run_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(document(tmp_path, prompt="oak")) == 2
    assert "is not a run directory" in capsys.readouterr().err


def test_a_long_text_does_not_end_the_chat(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("oak " * 256 + "\noak\n"))
    assert main(document(run)) == 0
    out, err = capsys.readouterr()
    assert out.strip() == expected(run / "model", "[user]oak[assistant]").strip()
    assert "give a shorter text" in err


def test_text_that_cannot_be_answered(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    standard_input = io.TextIOWrapper(io.BytesIO(b"fir \xff\noak\n"), encoding="utf-8")
    monkeypatch.setattr("sys.stdin", standard_input)
    assert main(document(run)) == 0
    out, err = capsys.readouterr()
    assert out == f"{expected(run / 'model', '[user]oak[assistant]')}\n"
    assert "the text 'fir \\udcff' is not UTF-8" in err
    (run / "model" / "chat_template.jinja").unlink()
    assert main(document(run, prompt="")) == 2
    assert "the text is empty" in capsys.readouterr().err
