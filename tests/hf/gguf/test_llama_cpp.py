"""llama.cpp computes what transformers computes, from GGUF files of the same models.

The npm package ``node-llama-cpp`` brings a built llama.cpp:

    npm install --prefix FOLDER node-llama-cpp
    NODE_MODULES=FOLDER/node_modules pytest -m slow tests/hf/gguf/test_llama_cpp.py

``REAL_MODEL`` may name the directory of a real model, dense or pruned by a run.
"""

import json
import math
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from espalier.hf.export.model import logits_of
from espalier.hf.export.peft_files import Adapted, edits_of
from espalier.hf.gguf.adapter_file import write_adapter
from espalier.hf.gguf.model_file import write_model
from espalier.hf.machine.computing import Computing
from espalier.hf.opening.opened_model import OpenedModel, open_model
from espalier.hf.stream.block_stream import BlockStream
from espalier.hf.stream.edits import Edits, dense
from espalier.models.structure import Structure
from pruning_kernels.lora.factors import Factors
from tests.hf.gguf.gguf_models import KINDS, save
from tests.hf.structured.structured_models import uneven

MODULES = os.environ.get("NODE_MODULES", "")
REAL_MODEL = os.environ.get("REAL_MODEL", "")
CHECK = Path(__file__).with_name("llama_cpp.mjs")
PROMPTS = [
    "The function returns", "Once upon a time", "import os\n", "The capital of France is",
    "In 1999, the", "def main(", "What is the meaning of life?", "A list of 3 items:", "She said",
    "    return x",
]  # fmt: skip
TEXT = "The oak and the elder, the larch and the maple: each tree has a number. " * 2
COUNT = 8
COMPUTING = Computing(torch.device("cpu"), torch.float32, 1)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (MODULES and shutil.which("node")), reason="NODE_MODULES names no node-llama-cpp"
    ),
]


def asked(tmp_path: Path, model: Path, lora: Path | None, text: str) -> dict[str, Any]:
    """Return the answers of llama.cpp."""
    question = {"model": str(model), "lora": lora and str(lora), "prompts": PROMPTS, "count": COUNT}
    (tmp_path / "question.json").write_text(json.dumps(question | {"text": text}))
    files = [str(tmp_path / name) for name in ("question.json", "answer.json")]
    subprocess.run(["node", str(CHECK), MODULES, *files], check=True)
    found: dict[str, Any] = json.loads((tmp_path / "answer.json").read_text())
    return found


@torch.no_grad()
def require_equal(model: OpenedModel, edits: Edits, found: dict[str, Any], text: str) -> None:
    """Require equal tokens of prompts and answers, and a perplexity within 1%."""
    stream = BlockStream(model, COMPUTING)

    def logits(tokens: list[int]) -> Tensor:
        return torch.cat(list(logits_of(stream, torch.tensor([tokens]), edits)))

    for prompt, tokens, answer in zip(PROMPTS, found["prompts"], found["greedy"], strict=True):
        assert tokens == model.tokenizer(prompt)["input_ids"]
        so_far = list(tokens)
        for token in answer:
            row = logits(so_far)[-1]
            # llama.cpp rounds keys and values to float16, so either of two very close tokens wins.
            assert row[token] >= row.max() - 5e-3, prompt
            so_far.append(token)
    tokens = model.tokenizer(text)["input_ids"]
    assert found["text"] == tokens
    losses = torch.nn.functional.cross_entropy(logits(tokens)[:-1], torch.tensor(tokens[1:]))
    assert math.exp(found["loss"] - losses.item()) == pytest.approx(1, abs=0.01)


def check(tmp_path: Path, model: OpenedModel, architecture: str, text: str = TEXT) -> None:
    file = tmp_path / "model.gguf"
    assert write_model(model, dense, file, "tiny", "float32") == architecture
    require_equal(model, dense, asked(tmp_path, file, None, text), text)


@pytest.mark.parametrize("name", KINDS)
def test_dense_models(tmp_path: Path, name: str) -> None:
    model = OpenedModel(save(tmp_path / "model", name))
    architecture = {"qwen2": "qwen2", "qwen3": "qwen3"}.get(name, "llama")
    check(tmp_path, model, architecture, "The oak and the elder")


def half_zero(weight: Tensor) -> Tensor:
    """Zero every second weight, as a mask does."""
    return weight * (torch.arange(weight.numel()).view_as(weight) % 2)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_masked_models(tmp_path: Path, name: str) -> None:
    model = OpenedModel(save(tmp_path / "model", name))

    def edits(index: int) -> dict[str, Callable[[Tensor], Tensor]]:
        return {linear.name: half_zero for linear in model.plan.blocks[index].linears}

    file = tmp_path / "model.gguf"
    assert write_model(model, edits, file, "tiny", "float32") == name
    text = "The oak and the elder"
    require_equal(model, edits, asked(tmp_path, file, None, text), text)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_models_with_equal_widths(tmp_path: Path, name: str) -> None:
    model = OpenedModel(save(tmp_path / "model", name))
    kept = {"groups": range(3), "channels": range(20)}
    structure = Structure.whole(model.plan).keeping(
        {block.index: kept for block in model.plan.blocks}
    )
    # The heads of this Qwen2 are narrower than its hidden size then, as ``qwen2`` cannot be.
    architecture = "deci" if name == "qwen2" else name
    small = OpenedModel(model.directory, structure)
    check(tmp_path, small, architecture, "The oak and the elder")


@pytest.mark.parametrize("name", ["llama", "llama with biases", "llama 3", "tied", "qwen2"])
def test_uneven_models(tmp_path: Path, name: str) -> None:
    model = OpenedModel(save(tmp_path / "model", name))
    small = OpenedModel(model.directory, uneven(model))
    check(tmp_path, small, "deci", "The oak and the elder")


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_models_with_fewer_blocks(tmp_path: Path, name: str) -> None:
    model = OpenedModel(save(tmp_path / "model", name))
    shallow = OpenedModel(model.directory, Structure.whole(model.plan).with_blocks([0, 3]))
    check(tmp_path, shallow, name, "The oak and the elder")


def test_tokenizer_with_bytes(tmp_path: Path) -> None:
    model = OpenedModel(save(tmp_path / "model", "llama", sentencepiece=True))
    check(tmp_path, model, "llama", "the cat sat on the mat")


def test_demo_model(tmp_path: Path) -> None:
    check(tmp_path, open_model("demo"), "llama")


@pytest.mark.parametrize("rank", [4, 96])
def test_adapter_of_the_demo_model(tmp_path: Path, rank: int) -> None:
    """Stacked adapters have large ranks."""
    model = open_model("demo")
    generator = torch.Generator().manual_seed(3)
    adapted: Adapted = {}
    for block in model.plan.blocks:
        adapted[block.index] = {
            linear.name: Factors(
                0.1 * torch.randn(linear.shape[0], rank, generator=generator),
                0.1 * torch.randn(rank, linear.shape[1], generator=generator),
                8.0 / rank,
            )
            for linear in block.linears
        }
    write_model(model, dense, tmp_path / "model.gguf", "demo", "float32")
    write_adapter(model, adapted, tmp_path / "adapter.gguf", "adapter")
    found = asked(tmp_path, tmp_path / "model.gguf", tmp_path / "adapter.gguf", TEXT)
    require_equal(model, edits_of(adapted), found, TEXT)


@pytest.mark.skipif(not REAL_MODEL, reason="REAL_MODEL names no directory")
def test_real_model(tmp_path: Path) -> None:
    model = OpenedModel(Path(REAL_MODEL))
    write_model(model, dense, tmp_path / "model.gguf", "real", "float16")
    require_equal(model, dense, asked(tmp_path, tmp_path / "model.gguf", None, TEXT), TEXT)
