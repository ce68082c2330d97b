"""Generated answers against a slow greedy loop; extraction of answers, written by hand."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from espalier.data.tasks.item import Item
from espalier.data.tasks.kinds.written_answers import NUMBERS
from espalier.data.tasks.task import Generation
from espalier.errors import EspalierError
from espalier.evaluation.exact_match import exact_match, found_answers, generate, shortened
from tests.data.tasks.tokens_at_ends import END, KINDS, START, raw_tokenizer, tokenizer_adding
from tests.tiny_model import save_tiny_llama

pytestmark = pytest.mark.usefixtures("tests_on_device")


@pytest.fixture(scope="module")
def model_and_tokenizer(
    tmp_path_factory: pytest.TempPathFactory, device: torch.device
) -> tuple[Any, Any]:
    folder = save_tiny_llama(tmp_path_factory.mktemp("model"), dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(
        folder, local_files_only=True, dtype=torch.float32
    ).eval()
    return model.to(device), AutoTokenizer.from_pretrained(
        folder, local_files_only=True, eos_token="<s>"
    )


@torch.no_grad()
def slowly(model: Any, tokenizer: Any, prompt: str, max_new_tokens: int, max_tokens: int) -> str:
    tokens = tokenizer.encode(prompt)[-(max_tokens - max_new_tokens) :]
    start = len(tokens)
    while len(tokens) < start + max_new_tokens:
        tokens.append(int(model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
        if tokens[-1] == tokenizer.eos_token_id:
            break
    return str(tokenizer.decode(tokens[start:], skip_special_tokens=True))


PROMPTS = ["oak", "birch cedar elder fir gorse", "hazel ivy juniper", "maple"]


@pytest.mark.parametrize("batch_size", [1, 4])
def test_texts_equal_slow_loop_up_to_stop_string(
    model_and_tokenizer: tuple[Any, Any], batch_size: int, device: torch.device
) -> None:
    model, tokenizer = model_and_tokenizer
    whole = [slowly(model, tokenizer, prompt, 12, 22) for prompt in PROMPTS]
    stop = whole[0][3:5]
    assert stop
    assert len({text.split(stop)[0] for text in whole}) > 1
    how = Generation((stop,), NUMBERS.patterns, NUMBERS.ignored, 12)
    assert generate(model, tokenizer, PROMPTS, how, 22, batch_size, device) == [
        text.split(stop)[0] for text in whole
    ]


def test_shortened_prompts_are_reported(model_and_tokenizer: tuple[Any, Any]) -> None:
    """The room is one token too small, exactly enough, and one token larger."""
    _, tokenizer = model_and_tokenizer
    prompt = "birch cedar elder fir gorse"
    tokens = len(tokenizer.encode(prompt))
    how = Generation(("x",), NUMBERS.patterns, NUMBERS.ignored, 12)
    lost = [shortened(tokenizer, ["oak", prompt], how, 12 + tokens + room) for room in (-1, 0, 1)]
    assert lost == [{1}, set(), set()]
    with pytest.raises(EspalierError, match="no token is left for the prompt"):
        shortened(tokenizer, PROMPTS, how, 12)


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_end_without_special_tokens(
    kind: tuple[bool, bool, bool], device: torch.device
) -> None:
    """The reference encodes prompts without special tokens and adds the first one by hand."""
    start, _, prefix_space = kind
    tokenizer = tokenizer_adding(*kind)
    made = raw_tokenizer(prefix_space)
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    model.to(device)
    expected = []
    lengths = []
    for prompt in PROMPTS:
        tokens = [START] * start + made.encode(prompt, add_special_tokens=False).ids
        lengths.append(len(tokens))
        for _ in range(8):
            tokens.append(int(model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
            if tokens[-1] == END:
                break
        expected.append(
            tokenizer.decode(tokens[lengths[-1] :], skip_special_tokens=True).split("\x00")[0]
        )
    how = Generation(("\x00",), NUMBERS.patterns, NUMBERS.ignored, 8)
    assert generate(model.to(device), tokenizer, PROMPTS, how, 60, 2, device) == expected
    longest = max(lengths)
    assert shortened(tokenizer, PROMPTS, how, longest + 8) == set()
    assert shortened(tokenizer, PROMPTS, how, longest + 7) == {
        place for place, length in enumerate(lengths) if length == longest
    }


def test_model_without_answer_room_is_refused(
    model_and_tokenizer: tuple[Any, Any],
) -> None:
    with pytest.raises(
        EspalierError,
        match=r"accepts 256 tokens and an answer may have 256, .* lower task.answer-tokens",
    ):
        generate(*model_and_tokenizer, PROMPTS, NUMBERS, 256)


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("3 + 4 = 7\n#### 7", "7", "7"),
        ("#### 1,200.", "1,200.", "1,200."),
        ("#### -5 or #### 6", "-5", "6"),
        ("so it is $18", "[invalid]", "$18"),
        ("about 3 of 9 pears.", "[invalid]", "9"),
        ("it is -12 degrees...", "[invalid]", "..."),
        ("none", "[invalid]", "[invalid]"),
    ],
)
def test_harness_patterns_find_answers(text: str, strict: str, flexible: str) -> None:
    assert found_answers([text], NUMBERS) == {
        "strict-match": [strict],
        "flexible-extract": [flexible],
    }


def test_match_ignores_commas_dollars_full_stop() -> None:
    items = [Item(("?",), (f"It grew.\n#### {number}",), 0) for number in ("1,200", "18", "7", "5")]
    texts = ["#### 1200.", "that is $18", "#### 7\nQuestion 9", "none"]
    assert exact_match(texts, items, NUMBERS) == {"strict-match": 0.5, "flexible-extract": 0.5}
