"""NF4 directories: plain transformers loads them, and Espalier reads the values of bitsandbytes."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from espalier.hf.machine.computing import Computing
from espalier.hf.nf4 import checkpoint
from espalier.hf.nf4.matrices import bitsandbytes, nf4_bytes
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.stream.block_stream import BlockStream, run_through
from espalier.hf.whole.model import load_whole
from tests.hf.nf4.nf4_folders import (
    CONFIGS,
    CPU,
    MATRIX,
    four_bit,
    handed_out,
    linears_of,
    plainly_loaded,
    quantised_anew,
    same,
    written,
)
from tests.hf.tiny_models import save_model, token_sequences


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# ----- loading with other libraries ---------------------------------------------------------------


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_plain_transformers_computes_the_same(
    name: str, double: bool, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    base = OpenedModel(saved(name))
    folder = written(base.directory, tmp_path / "nf4", double)
    theirs = plainly_loaded(folder)
    model = OpenedModel(folder)
    ours = load_whole(model, Computing(theirs.device, torch.float32, 1), "nf4")
    assert [f"{path}.weight" for path in four_bit(theirs)] == [
        path + ".weight" for path in four_bit(ours)
    ]
    assert {f"{path}.weight" for path in four_bit(theirs)} == set(linears_of(base))
    tied = theirs.get_output_embeddings().weight is theirs.get_input_embeddings().weight
    assert tied == base.config["tie_word_embeddings"]
    samples = token_sequences(3, 9)
    found = theirs(input_ids=samples.to(theirs.device)).logits
    assert torch.equal(found, ours(input_ids=samples.to(theirs.device)).logits)
    computing = Computing(CPU, torch.float32, 1)
    stream = BlockStream(model, computing)
    walked = torch.cat(list(stream.logits(run_through(stream, samples)))).view(found.shape)
    torch.testing.assert_close(found.cpu(), walked, rtol=1e-4, atol=1e-4)
    wide = load_whole(model, computing, "float32")
    torch.testing.assert_close(wide(input_ids=samples).logits, walked, rtol=1e-4, atol=1e-4)
    assert not four_bit(wide)
    assert not hasattr(wide.config, "quantization_config")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_it_computes_in_the_dtype_of_the_files(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = written(
        save_model(tmp_path / "saved", CONFIGS["qwen2"], dtype), tmp_path / "nf4", True
    )
    theirs = plainly_loaded(folder)
    assert {
        parameter.dtype
        for name, parameter in theirs.named_parameters()
        if "_proj.weight" not in name
    } == {dtype}
    assert {
        (linear.compute_dtype, linear.weight.quant_state.dtype)
        for linear in four_bit(theirs).values()
    } == {(dtype, dtype)}
    ours = load_whole(OpenedModel(folder), Computing(theirs.device, dtype, 1), "nf4")
    samples = token_sequences(2, 7).to(theirs.device)
    assert torch.equal(theirs(input_ids=samples).logits, ours(input_ids=samples).logits)


def test_missing_dtype_is_that_of_files(tmp_path: Path) -> None:
    directory = save_model(tmp_path / "saved", CONFIGS["llama"], torch.bfloat16)
    config = json.loads((directory / "config.json").read_text())
    config.pop("dtype")
    (directory / "config.json").write_text(json.dumps(config))
    assert plainly_loaded(written(directory, tmp_path / "nf4", True)).dtype == torch.bfloat16


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("name", ["llama", "opt"])
def test_what_transformers_writes_is_read(
    name: str, double: bool, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    """Covers models in several files."""
    way = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=double
    )
    theirs = AutoModelForCausalLM.from_pretrained(saved(name), quantization_config=way)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="40KB")
    model = OpenedModel(tmp_path / "theirs")
    assert len(model.checkpoint.shards) > 1
    assert set(linears_of(model)) == {f"{path}.weight" for path in four_bit(theirs)}
    for path, linear in four_bit(theirs).items():
        expected = bitsandbytes().functional.dequantize_4bit(
            linear.weight.data, linear.weight.quant_state
        )
        assert torch.equal(model.checkpoint.read(f"{path}.weight"), expected.cpu())


# ----- values -------------------------------------------------------------------------------------


@pytest.fixture(params=[True, False], ids=["double", "single"])
def lengthy(
    request: pytest.FixtureRequest, long: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> OpenedModel:
    """NF4 model, read in steps of 10,240 weights: 160 scales, not a whole nested block."""
    monkeypatch.setattr(checkpoint, "STRETCH", 10_240)
    return OpenedModel(written(long, tmp_path / "nf4", request.param))


def test_values_equal_those_of_bitsandbytes(lengthy: OpenedModel) -> None:
    for path, linear in four_bit(plainly_loaded(lengthy.directory)).items():
        expected = (
            bitsandbytes()
            .functional.dequantize_4bit(linear.weight.data, linear.weight.quant_state)
            .cpu()
        )
        stored = lengthy.checkpoint.tensors[f"{path}.weight"]
        found = lengthy.checkpoint.read(f"{path}.weight")
        assert found.dtype == expected.dtype == torch.float32
        assert torch.equal(found, expected)
        assert (stored.dtype, stored.shape, stored.num_bytes) == (
            "F32",
            tuple(expected.shape),
            expected.nbytes,
        )


def test_rows_and_pieces_are_parts_of_whole(lengthy: OpenedModel) -> None:
    found = lengthy.checkpoint
    for name in found.tensors:
        whole = found.read(name)
        assert b"".join(found.chunks(name)) == whole.numpy().tobytes()
        assert torch.equal(found.read_into(name, found.room(name)), whole)
        for first, last in [
            (0, 1),
            (0, len(whole)),
            (len(whole) - 1, len(whole)),
            (7, 59),
            (60, 61),
            (5, 5),
        ]:
            assert torch.equal(found.read_rows(name, first, last), whole[first:last])
    assert max(len(chunk) for chunk in found.chunks(MATRIX)) == 4 * 10_240


def test_only_quantised_values_change_a_little(long: Path, lengthy: OpenedModel) -> None:
    base = OpenedModel(long)
    assert lengthy.checkpoint.tensors.keys() == base.checkpoint.tensors.keys()
    quantised = set(linears_of(base))
    for name in base.checkpoint.tensors:
        was = base.checkpoint.read(name)
        found = lengthy.checkpoint.read(name)
        if name in quantised:
            assert 0 < (found - was).norm() < 0.15 * was.norm()
        else:
            assert torch.equal(found, was)
    assert (lengthy.plan.num_parameters, lengthy.family) == (base.plan.num_parameters, base.family)
    assert [linear.shape for linear in lengthy.plan.blocks[0].linears] == [
        linear.shape for linear in base.plan.blocks[0].linears
    ]


@pytest.mark.parametrize("double", [True, False])
def test_stored_matrices_are_handed_out_as_is(
    double: bool, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    """A cache has no effect on stored NF4 matrices."""
    base = OpenedModel(saved("opt"))
    model = OpenedModel(written(base.directory, tmp_path / "nf4", double))
    expected = quantised_anew(base, double)
    assert same(handed_out(model, tmp_path / "cache"), expected)
    assert not (tmp_path / "cache").exists()


def test_its_hash_is_of_the_stored_bytes(folder: Path, saved: Callable[[str], Path]) -> None:
    model = OpenedModel(folder)
    again = OpenedModel(folder)
    assert model.sha256 == again.sha256 != OpenedModel(saved("llama")).sha256
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{MATRIX}.absmax"][3] ^= 1
    save_file(tensors, folder / "model.safetensors")
    assert OpenedModel(folder).sha256 != model.sha256


def test_it_is_opened_and_hashed_without_torch(folder: Path) -> None:
    program = (
        "import sys\nfor name in ('torch', 'transformers', 'bitsandbytes'): sys.modules[name] ="
        " None\nfrom pathlib import Path\nfrom espalier.hf.opening.opened_model import"
        " OpenedModel\nprint(OpenedModel(Path(sys.argv[1])).sha256)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)], capture_output=True, text=True
    )
    assert done.stdout.strip() == OpenedModel(folder).sha256, done.stderr


# ----- bytes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("double", [True, False])
def test_bytes_on_paper(double: bool, saved: Callable[[str], Path], tmp_path: Path) -> None:
    """Each matrix has its own tables and a state of 256 bytes.

    With double quantisation, the state holds the offset and replaces its four bytes.
    """
    base = OpenedModel(saved("qwen2"))
    folder = written(base.directory, tmp_path / "nf4", double)
    stored = load_file(folder / "model.safetensors")
    matrices = len(linears_of(base))
    rest = sum(
        own.num_bytes
        for name, own in base.checkpoint.tensors.items()
        if name not in linears_of(base)
    )
    offsets = 4 * double
    tables = nf4_bytes([], double)
    shapes = [linear.shape for block in base.plan.blocks for linear in block.linears]
    in_nf4 = nf4_bytes(shapes, double) - tables + matrices * (tables + 256 - offsets)
    assert sum(tensor.nbytes for tensor in stored.values()) == in_nf4 + rest


def test_the_same_model_gives_the_same_bytes(saved: Callable[[str], Path], tmp_path: Path) -> None:
    """Covers sharded bases and a target directory that exists."""
    one = contents(written(saved("llama"), tmp_path / "one", True))
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "of before").write_text("")
    assert contents(written(saved("llama"), tmp_path / "two", True)) == one
    sharded = save_model(tmp_path / "sharded", CONFIGS["llama"], max_shard_size="40KB")
    assert contents(written(sharded, tmp_path / "three", True)) == one
    assert set(one) == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


@pytest.mark.parametrize("double", [True, False])
def test_one_in_nf4_is_written_again_as_it_is(
    double: bool, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    one = written(saved("opt"), tmp_path / "one", double)
    assert contents(written(one, tmp_path / "two", double)) == contents(one)


def test_scales_can_be_rewritten_in_other_form(
    saved: Callable[[str], Path], tmp_path: Path
) -> None:
    single = written(saved("llama"), tmp_path / "single", False)
    assert contents(written(single, tmp_path / "double", True)) == contents(
        written(saved("llama"), tmp_path / "direct", True)
    )
