"""GGUF files of tiny models, read by the library ``gguf``; llama.cpp reads them in a slow test."""

import json
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from espalier.errors import InputError
from espalier.hf.export.peft_files import Adapted
from espalier.hf.gguf.adapter_file import write_adapter
from espalier.hf.gguf.model_file import write_model
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.stream.edits import dense
from pruning_kernels.lora.factors import Factors
from tests.hf.gguf.gguf_models import LLAMA_3, save
from tests.hf.structured.structured_models import uneven
from tests.hf.tiny_models import save_tokenizer as save_words

HEADS = {"q_proj": 8, "k_proj": 4}
NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}  # fmt: skip


class File:
    """GGUF file as the library reads it."""

    def __init__(self, path: Path) -> None:
        self.reader = gguf.GGUFReader(path)
        self.tensors = {one.name: one.data for one in self.reader.tensors}
        """Tensors in the order of numpy, whose last dimension is the first of GGUF."""

    def __getitem__(self, key: str) -> Any:
        field = self.reader.fields[key]
        return field.contents()


def written(directory: Path, target: Path, dtype: str = "float32") -> File:
    write_model(OpenedModel(directory), dense, target, "tiny", dtype)
    return File(target)


def rotated_by_hand(value: torch.Tensor, heads: int) -> torch.Tensor:
    """Return the rows in llama.cpp's order: row i of a head, then row i + half of the head."""
    head_dim = len(value) // heads
    rows = []
    for head in range(heads):
        for number in range(head_dim // 2):
            rows += [head * head_dim + number, head * head_dim + head_dim // 2 + number]
    return value[rows]


@pytest.mark.parametrize("name", ["llama", "llama with biases", "mistral", "qwen2", "qwen3"])
def test_every_tensor_is_there_in_its_order(tmp_path: Path, name: str) -> None:
    directory = save(tmp_path / "model", name)
    file = written(directory, tmp_path / "model.gguf")
    architecture = {"mistral": "llama"}.get(name, name.split()[0])
    assert file["general.architecture"] == architecture
    stored = load_file(directory / "model.safetensors")
    expected = {
        "token_embd.weight": stored.pop("model.embed_tokens.weight"),
        "output_norm.weight": stored.pop("model.norm.weight"),
        "output.weight": stored.pop("lm_head.weight"),
    }
    for key, value in stored.items():
        _, _, block, path = key.split(".", 3)
        module, _, kind = path.rpartition(".")
        heads = HEADS.get(module.split(".")[-1]) if architecture == "llama" else None
        own = value if heads is None else rotated_by_hand(value, heads)
        expected[f"blk.{block}.{NAMES[module]}.{kind}"] = own
    assert file.tensors.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_array_equal(file.tensors[key], value.numpy())


def test_the_keys_by_hand(tmp_path: Path) -> None:
    file = written(save(tmp_path / "model", "llama"), tmp_path / "model.gguf")
    assert {key: file[f"llama.{key}"] for key in (
        "block_count", "context_length", "embedding_length", "feed_forward_length",
        "attention.head_count", "attention.head_count_kv", "attention.key_length",
        "rope.dimension_count", "rope.freq_base",
    )} == {
        "block_count": 4, "context_length": 64, "embedding_length": 32, "feed_forward_length": 48,
        "attention.head_count": 8, "attention.head_count_kv": 4, "attention.key_length": 8,
        "rope.dimension_count": 8, "rope.freq_base": 10000.0,
    }  # fmt: skip
    assert (file["tokenizer.ggml.model"], file["tokenizer.ggml.pre"]) == ("gpt2", "gpt-2")
    document = json.loads((tmp_path / "model" / "tokenizer.json").read_text())
    tokens = file["tokenizer.ggml.tokens"]
    assert {token: tokens.index(token) for token in document["model"]["vocab"]} == document[
        "model"
    ]["vocab"]
    assert file["tokenizer.ggml.merges"] == [" ".join(pair) for pair in document["model"]["merges"]]


def test_a_pruned_model_has_the_widths_of_its_blocks(tmp_path: Path) -> None:
    model = OpenedModel(save(tmp_path / "model", "llama"))
    small = OpenedModel(model.directory, uneven(model))
    write_model(small, dense, tmp_path / "small.gguf", "small", "float32")
    file = File(tmp_path / "small.gguf")
    assert file["general.architecture"] == "deci"
    assert file["deci.block_count"] == 3
    assert file["deci.attention.head_count"] == [6, 2, 8]
    assert file["deci.attention.head_count_kv"] == [3, 1, 4]
    assert file["deci.feed_forward_length"] == [16, 5, 38]
    stored = load_file(model.directory / "model.safetensors")
    # Block 1 was dropped, and block 2 keeps the first group, which has two query heads.
    query = stored["model.layers.2.self_attn.q_proj.weight"][:16]
    np.testing.assert_array_equal(
        file.tensors["blk.1.attn_q.weight"], rotated_by_hand(query, 2).numpy()
    )


def test_models_with_fewer_blocks_stay_llama(tmp_path: Path) -> None:
    model = OpenedModel(save(tmp_path / "model", "qwen3"))
    shallow = OpenedModel(model.directory, uneven(model).whole(model.plan).with_blocks([0, 3]))
    assert write_model(shallow, dense, tmp_path / "a.gguf", "a") == "qwen3"
    assert File(tmp_path / "a.gguf")["qwen3.block_count"] == 2


def test_formats(tmp_path: Path) -> None:
    directory = save(tmp_path / "model", "llama")
    half = written(directory, tmp_path / "half.gguf", "float16")
    brain = written(directory, tmp_path / "brain.gguf", "bfloat16")
    stored = load_file(directory / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    np.testing.assert_array_equal(
        half.tensors["blk.0.ffn_up.weight"], stored.to(torch.float16).numpy()
    )
    bits = brain.tensors["blk.0.ffn_up.weight"].view(np.int16)
    np.testing.assert_array_equal(bits, stored.to(torch.bfloat16).view(torch.int16).numpy())
    # llama.cpp needs vectors in float32.
    assert half.tensors["blk.0.attn_norm.weight"].dtype == np.float32
    weights = load_file(directory / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][0, 0] = 1e5
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=r"--dtype float16: .*up_proj.* beyond 65504"):
        written(directory, tmp_path / "large.gguf", "float16")


def test_factors_of_llama_3_by_hand(tmp_path: Path) -> None:
    file = written(save(tmp_path / "model", "llama 3"), tmp_path / "model.gguf")
    rope = LLAMA_3["rope_parameters"]
    expected = []
    for number in range(4):
        wavelength = 2 * math.pi * 1e4 ** (number / 4)
        if wavelength < 32 / rope["high_freq_factor"]:
            expected.append(1.0)
        elif wavelength > 32 / rope["low_freq_factor"]:
            expected.append(4.0)
        else:
            smooth = (32 / wavelength - 1.0) / (4.0 - 1.0)
            expected.append(1 / ((1 - smooth) / 4.0 + smooth))
    assert expected[0] == 1.0
    assert expected[-1] == 4.0
    np.testing.assert_allclose(file.tensors["rope_freqs.weight"], expected, rtol=1e-6)


def test_scores_of_a_tokenizer_with_bytes(tmp_path: Path) -> None:
    directory = save(tmp_path / "model", "llama", sentencepiece=True)
    file = written(directory, tmp_path / "model.gguf")
    merges = json.loads((directory / "tokenizer.json").read_text())["model"]["merges"]
    tokens = file["tokenizer.ggml.tokens"]
    kinds = file["tokenizer.ggml.token_type"]
    scores = file["tokenizer.ggml.scores"]
    assert file["tokenizer.ggml.model"] == "llama"
    assert scores[tokens.index("".join(merges[0]))] == 0.0
    assert scores[tokens.index("".join(merges[3]))] == -3.0
    assert kinds[tokens.index("<0x0A>")] == gguf.TokenType.BYTE
    assert kinds[tokens.index("<unk>")] == gguf.TokenType.UNKNOWN
    assert kinds[tokens.index("</s>")] == gguf.TokenType.CONTROL


def test_an_adapter_by_hand(tmp_path: Path) -> None:
    model = OpenedModel(save(tmp_path / "model", "llama"))
    a = torch.arange(64.0).view(2, 32)
    b = torch.arange(128.0).view(64, 2)
    adapted: Adapted = {
        1: {"attn.q": Factors(b, a, 1.5), "mlp.down": Factors(b[:32], a[:, :24].repeat(1, 2), 1.5)}
    }
    assert write_adapter(model, adapted, tmp_path / "adapter.gguf", "mine") == "llama"
    file = File(tmp_path / "adapter.gguf")
    assert (file["general.type"], file["adapter.type"]) == ("adapter", "lora")
    assert file["adapter.lora.alpha"] == 3.0
    assert list(file.tensors) == [
        "blk.1.attn_q.weight.lora_a", "blk.1.attn_q.weight.lora_b",
        "blk.1.ffn_down.weight.lora_a", "blk.1.ffn_down.weight.lora_b",
    ]  # fmt: skip
    np.testing.assert_array_equal(file.tensors["blk.1.attn_q.weight.lora_a"], a.numpy())
    np.testing.assert_array_equal(
        file.tensors["blk.1.attn_q.weight.lora_b"], rotated_by_hand(b, 8).numpy()
    )
    np.testing.assert_array_equal(file.tensors["blk.1.ffn_down.weight.lora_b"], b[:32].numpy())


def test_what_llama_cpp_lacks_is_refused(tmp_path: Path) -> None:
    qwen = OpenedModel(save(tmp_path / "qwen3", "qwen3"))
    with pytest.raises(InputError, match="model_type = 'qwen3': its blocks differ in width"):
        write_model(OpenedModel(qwen.directory, uneven(qwen)), dense, tmp_path / "a", "a")
    llama = OpenedModel(save(tmp_path / "llama", "llama"))
    residual = OpenedModel(llama.directory, uneven(llama, residual=True))
    with pytest.raises(InputError, match=r"parts of the residual stream \(SFT-P\)"):
        write_model(residual, dense, tmp_path / "a", "a")
    save_words(llama.directory)
    with pytest.raises(InputError, match=r"model\.type = 'WordLevel': GGUF files need a BPE"):
        write_model(OpenedModel(llama.directory), dense, tmp_path / "a", "a")


@pytest.mark.parametrize(
    ("pre_tokenizer", "name"),
    [
        ([{"type": "Digits", "individual_digits": True}, {"type": "ByteLevel"}], "smollm"),
        ([{"type": "Whitespace"}, {"type": "ByteLevel"}], None),
        ([{"type": "ByteLevel", "add_prefix_space": True}], None),
    ],
)
def test_ways_to_split_a_text(
    tmp_path: Path, pre_tokenizer: list[dict[str, Any]], name: str | None
) -> None:
    directory = save(tmp_path / "model", "llama")
    path = directory / "tokenizer.json"
    steps = [
        {"add_prefix_space": False, "trim_offsets": True, "use_regex": True} | step
        if step["type"] == "ByteLevel"
        else step
        for step in pre_tokenizer
    ]
    document = json.loads(path.read_text())
    document["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    path.write_text(json.dumps(document))
    if name is None:
        with pytest.raises(InputError, match="splits texts in a way that has no name"):
            written(directory, tmp_path / "model.gguf")
    else:
        assert written(directory, tmp_path / "model.gguf")["tokenizer.ggml.pre"] == name
