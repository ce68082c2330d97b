"""NF4 directories: plain transformers loads them, and Espalier reads the values of bitsandbytes."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    OPTConfig,
    PretrainedConfig,
    Qwen2Config,
)

from espalier.errors import EspalierError
from espalier.hf.export.model import check_export, export_edited
from espalier.hf.files.checkpoint import Checkpoint
from espalier.hf.machine.computing import Computing
from espalier.hf.nf4 import checkpoint
from espalier.hf.nf4.cache import quantised_linears
from espalier.hf.nf4.checkpoint import QuantisedCheckpoint
from espalier.hf.nf4.folder import write_quantised
from espalier.hf.nf4.matrices import bitsandbytes, nf4_bytes, quantise
from espalier.hf.opening.opened import OpenedModel
from espalier.hf.stream.block_stream import BlockStream, run_through
from espalier.hf.stream.edits import dense
from espalier.hf.structured.export import export_structured
from espalier.hf.whole.model import load_whole
from espalier.models.structure import Structure
from tests.hf.tiny_encoders import save_encoder
from tests.hf.tiny_models import VOCABULARY, llama_config, random_model, save_model, token_sequences

CPU = torch.device("cpu")
WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
SIZES: dict[str, Any] = WIDE | {
    "vocab_size": VOCABULARY,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
OPT_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "ffn_dim": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "init_std": 0.2,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": llama_config(**WIDE),
    "llama tied, with biases": llama_config(
        **WIDE, tie_word_embeddings=True, attention_bias=True, mlp_bias=True
    ),
    "qwen2": Qwen2Config(
        **SIZES,
        tie_word_embeddings=False,
        use_sliding_window=True,
        sliding_window=4,
        max_window_layers=2,
    ),
    "opt": OPTConfig(**OPT_SIZES),
    "opt with projections": OPTConfig(**OPT_SIZES, word_embed_proj_dim=24),
}
LONG = llama_config(hidden_size=128, intermediate_size=320, num_hidden_layers=1)
"""Model whose larger matrices have 640 scales: two and a half blocks of nested scales."""
MATRIX = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that saves a tiny model of a family, once per module."""
    root = tmp_path_factory.mktemp("saved")

    def save(name: str) -> Path:
        directory = root / name
        return directory if directory.exists() else save_model(directory, CONFIGS[name])

    return save


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("long"), LONG)


@pytest.fixture
def folder(saved: Callable[[str], Path], tmp_path: Path) -> Path:
    """LLaMA in NF4 with double quantisation, for a test to damage."""
    return written(saved("llama"), tmp_path / "nf4", True)


def written(directory: Path, target: Path, double: bool) -> Path:
    write_quantised(OpenedModel(directory), target, double)
    return target


def plainly_loaded(folder: Path) -> Any:
    """Load the model as any user of transformers does.

    Only the repacking on CPUs with AVX512-BF16 is switched off (see ``linear_of``).
    """
    found, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    for module in four_bit(found).values():
        module.support_avx512bf16_for_cpu = False
    return found.eval()


def four_bit(whole: nn.Module) -> dict[str, Any]:
    return {
        path: module
        for path, module in whole.named_modules()
        if isinstance(module, bitsandbytes().nn.Linear4bit)
    }


def linears_of(model: OpenedModel) -> list[str]:
    return [linear.parameter for block in model.plan.blocks for linear in block.linears]


def handed_out(model: OpenedModel, cache: Path | None = None) -> dict[str, dict[str, Tensor]]:
    return {
        linear.parameter: matrix.tensors for linear, matrix in quantised_linears(model, CPU, cache)
    }


def quantised_anew(model: OpenedModel, double: bool) -> dict[str, dict[str, Tensor]]:
    """Quantise each matrix again from the float32 values of the files."""
    shapes = {
        linear.parameter: linear.shape for block in model.plan.blocks for linear in block.linears
    }
    tensors = load_file(model.directory / "model.safetensors")
    return {
        name: quantise([tensors[name].float().flatten()], shape, CPU, double).tensors
        for name, shape in shapes.items()
    }


def same(one: dict[str, dict[str, Tensor]], other: dict[str, dict[str, Tensor]]) -> bool:
    return list(one) == list(other) and all(
        one[key].keys() == other[key].keys()
        and all(torch.equal(tensor, other[key][part]) for part, tensor in one[key].items())
        for key in one
    )


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
        " None\nfrom pathlib import Path\nfrom espalier.hf.opening.opened import"
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


# ----- smaller models -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "qwen2", "opt"])
@torch.no_grad()
def test_model_without_some_blocks_stays_plain(
    name: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    base = OpenedModel(saved(name))
    small = OpenedModel(base.directory, Structure.whole(base.plan).with_blocks([0, 2]))
    write_quantised(small, tmp_path / "nf4", True)
    theirs = plainly_loaded(tmp_path / "nf4")
    model = OpenedModel(tmp_path / "nf4")
    assert len(model.plan.blocks) == theirs.config.num_hidden_layers == 2
    assert type(theirs) is type(random_model(CONFIGS[name]))
    assert model.structure is None
    numbers = {
        name: name.replace("layers.2.", "layers.1.")
        for name in linears_of(base)
        if "layers.1." not in name
    }
    whole = quantised_anew(base, True)
    assert same(handed_out(model), {new: whole[old] for old, new in numbers.items()})
    samples = token_sequences(2, 9).to(theirs.device)
    ours = load_whole(model, Computing(theirs.device, torch.float32, 1), "nf4")
    assert torch.equal(theirs(input_ids=samples).logits, ours(input_ids=samples).logits)
    near = load_whole(small, Computing(theirs.device, torch.float32, 1), "nf4")
    torch.testing.assert_close(
        near(input_ids=samples).logits, theirs(input_ids=samples).logits, rtol=1e-4, atol=1e-4
    )


def test_without_no_block_it_is_the_whole_model(
    saved: Callable[[str], Path], tmp_path: Path
) -> None:
    base = OpenedModel(saved("qwen2"))
    write_quantised(
        OpenedModel(base.directory, Structure.whole(base.plan)), tmp_path / "kept", True
    )
    expected = written(base.directory, tmp_path / "whole", True)
    assert (tmp_path / "kept" / "model.safetensors").read_bytes() == (
        expected / "model.safetensors"
    ).read_bytes()
    assert same(handed_out(OpenedModel(tmp_path / "kept")), quantised_anew(base, True))


def test_dropped_blocks_leave_other_codes_alone(folder: Path, tmp_path: Path) -> None:
    whole = OpenedModel(folder)
    small = OpenedModel(folder, Structure.whole(whole.plan).with_blocks([1, 2]))
    expected = {
        name.replace("layers.1", "layers.0").replace("layers.2", "layers.1"): tensors
        for name, tensors in handed_out(whole).items()
        if "layers.0." not in name
    }
    assert same(handed_out(small), expected)
    write_quantised(small, tmp_path / "small", True)
    assert same(handed_out(OpenedModel(tmp_path / "small")), expected)
    assert len({small.sha256, whole.sha256, OpenedModel(tmp_path / "small").sha256}) == 3


def test_units_are_cut_from_nf4_as_from_float32(folder: Path) -> None:
    whole = OpenedModel(folder)
    small = OpenedModel(
        folder, Structure.whole(whole.plan).keeping({0: {"channels": list(range(0, 128, 2))}})
    )
    assert torch.equal(small.checkpoint.read(MATRIX), whole.checkpoint.read(MATRIX)[:, ::2])
    up = MATRIX.replace("down", "up")
    assert torch.equal(small.checkpoint.read(up), whole.checkpoint.read(up)[::2])
    assert handed_out(small)[MATRIX]["packed"].shape == (64 * 64 // 2, 1)


def test_unsupported_structures_are_refused(saved: Callable[[str], Path], tmp_path: Path) -> None:
    base = OpenedModel(saved("llama"))
    uneven = OpenedModel(
        base.directory, Structure.whole(base.plan).keeping({0: {"channels": list(range(64))}})
    )
    with pytest.raises(
        EspalierError,
        match=r"llama: the smaller model cannot be written in NF4, .*; drop only whole blocks",
    ):
        write_quantised(uneven, tmp_path / "nf4", True)
    encoder = save_encoder(tmp_path / "encoder", "bert", hidden_size=64, intermediate_size=64)
    with pytest.raises(EspalierError, match=r"an encoder"):
        write_quantised(OpenedModel(encoder), tmp_path / "nf4", True)
    narrow = save_model(tmp_path / "narrow", llama_config(hidden_size=64, intermediate_size=96))
    with pytest.raises(EspalierError, match=r"mlp.down_proj.weight has 96 input features"):
        write_quantised(OpenedModel(narrow), tmp_path / "nf4", True)
    assert not (tmp_path / "nf4").exists()


# ----- models made from an NF4 base ---------------------------------------------------------------


def test_an_export_is_in_float32_and_says_so(
    saved: Callable[[str], Path], folder: Path, tmp_path: Path
) -> None:
    """Covers sharded bases, whose index names other tensors than the export."""
    way = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    theirs = AutoModelForCausalLM.from_pretrained(saved("llama"), quantization_config=way)
    theirs.save_pretrained(tmp_path / "sharded", max_shard_size="40KB")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(folder / file, tmp_path / "sharded" / file)
    for source in (folder, tmp_path / "sharded"):
        stream = BlockStream(OpenedModel(source), Computing(CPU, torch.float32, 1))
        export_edited(stream.model, dense, tmp_path / "model")
        assert "quantization_config" not in json.loads(
            (tmp_path / "model" / "config.json").read_text()
        )
        check_export(stream, dense, tmp_path / "model", token_sequences(2, 7))
        assert type(OpenedModel(tmp_path / "model").checkpoint) is Checkpoint


def test_smaller_export_is_in_float32(folder: Path, tmp_path: Path) -> None:
    small = OpenedModel(folder, Structure.whole(OpenedModel(folder).plan).with_blocks([0, 2]))
    export_structured(small, dense, tmp_path / "model", "plain")
    found = OpenedModel(tmp_path / "model")
    assert "quantization_config" not in json.loads((tmp_path / "model" / "config.json").read_text())
    assert torch.equal(found.checkpoint.read(MATRIX), small.checkpoint.read(MATRIX))


# ----- damage -------------------------------------------------------------------------------------

Change = Callable[[dict[str, Tensor]], None]


def state(**changes: object) -> Change:
    """Return a change of the quantisation state of a matrix."""

    def change(tensors: dict[str, Tensor]) -> None:
        name = f"{MATRIX}.quant_state.bitsandbytes__nf4"
        said = json.loads(bytes(tensors[name].tolist())) | changes
        tensors[name] = torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)

    return change


def without(part: str) -> Change:
    return lambda tensors: tensors.__delitem__(f"{MATRIX}.{part}")


def other(part: str, change: Callable[[Tensor], Tensor]) -> Change:
    def changed(tensors: dict[str, Tensor]) -> None:
        name = f"{MATRIX}.{part}" if part else MATRIX
        tensors[name] = change(tensors[name]).contiguous()

    return changed


def as_fp4(tensors: dict[str, Tensor]) -> None:
    tensors[f"{MATRIX}.quant_state.bitsandbytes__fp4"] = tensors.pop(
        f"{MATRIX}.quant_state.bitsandbytes__nf4"
    )


DAMAGE: dict[str, tuple[Change, str]] = {
    "no scales": (without("absmax"), "absmax of a matrix in NF4 is missing"),
    "no table": (without("quant_map"), "quant_map of a matrix in NF4 is missing"),
    "no scales of scales": (
        without("nested_absmax"),
        "nested_absmax of a matrix in NF4 is missing",
    ),
    "no state": (
        without("quant_state.bitsandbytes__nf4"),
        "bitsandbytes__nf4 of a matrix in NF4 is missing",
    ),
    "no codes": (
        lambda tensors: tensors.__delitem__(MATRIX),
        "down_proj.weight of a matrix in NF4 is missing",
    ),
    "codes in float": (
        other("", lambda codes: codes.float()),
        r"is F32 \[4096, 1\], not U8 \[4096, 1\]",
    ),
    "codes too short": (
        other("", lambda codes: codes[:-1]),
        r"is U8 \[4095, 1\], not U8 \[4096, 1\]",
    ),
    "scales too short": (
        other("absmax", lambda scales: scales[1:]),
        r"absmax of a matrix in NF4 is U8 \[127\], not U8 \[128\]",
    ),
    "scales in float": (
        other("absmax", lambda scales: scales.float()),
        r"absmax of a matrix in NF4 is F32 \[128\], not U8 \[128\]",
    ),
    "another shape": (state(shape=[128, 128]), r"is U8 \[4096, 1\], not U8 \[8192, 1\]"),
    "rows that share blocks": (state(shape=[256, 32]), "rows are not a multiple of the block size"),
    "no shape": (state(shape=[8192]), "has no shape"),
    "a shape of words": (state(shape=["a", "b"]), "has no shape"),
    "shape null": (state(shape=None), "was not written by bitsandbytes"),
    "blocks of another length": (state(blocksize=128), "not NF4 in blocks of 64"),
    "another type": (state(quant_type="fp4"), "not NF4 in blocks of 64"),
    "another nested length": (state(nested_blocksize=64), "scales are quantised in an unknown way"),
    "offset no number": (
        state(nested_offset=float("nan")),
        "scales are quantised in an unknown way",
    ),
    "state no text": (
        other("quant_state.bitsandbytes__nf4", lambda text: text[:20]),
        "copy the model again",
    ),
    "state too long": (
        other("quant_state.bitsandbytes__nf4", lambda text: text.repeat(17)),
        "no text of at most 4096 bytes",
    ),
    "fp4": (as_fp4, "nf4 of a matrix in NF4 is missing"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_folder_is_refused_on_opening(damage: str, folder: Path) -> None:
    change, message = DAMAGE[damage]
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(EspalierError, match=rf"nf4.*: tensor .*{message}.*"):
        OpenedModel(folder)


@pytest.mark.parametrize("part", ["quant_map", "nested_quant_map"])
def test_other_tables_are_refused_on_reading(part: str, folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{MATRIX}.{part}"] += 0.01
    save_file(tensors, folder / "model.safetensors")
    model = OpenedModel(folder)
    for read in (lambda: model.checkpoint.read(MATRIX), lambda: handed_out(model)):
        with pytest.raises(
            EspalierError,
            match=rf"model.safetensors: tensor {MATRIX}.{part} of a matrix in NF4 is not the table",
        ):
            read()


def test_a_file_that_was_cut_is_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    model = OpenedModel(folder)
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(EspalierError, match=r"model.safetensors: is not a whole"):
        OpenedModel(folder)
    with pytest.raises(
        EspalierError, match=r"model.safetensors: ends before tensor model.layers.2"
    ):
        model.checkpoint.read("model.layers.2.self_attn.v_proj.weight")
    with pytest.raises(EspalierError, match=r"model.safetensors: ends before tensor"):
        handed_out(model)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"load_in_8bit": True, "load_in_4bit": False}, "load_in_8bit = True"),
        ({"load_in_4bit": False}, "load_in_4bit = False"),
        ({"bnb_4bit_quant_type": "fp4"}, "bnb_4bit_quant_type = 'fp4'"),
        ({"bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage = 'bfloat16'"),
        ({"quant_method": "gptq"}, "quant_method = 'gptq'"),
        ({"quant_method": ["bitsandbytes"]}, "quant_method"),
        ({"bnb_4bit_use_double_quant": "yes"}, "bnb_4bit_use_double_quant = 'yes'"),
    ],
)
def test_another_quantisation_is_named(
    changes: dict[str, object], message: str, folder: Path
) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        EspalierError,
        match=(
            rf"config.json: quantization_config is set, with {message}.*; name the model before quantisation"
        ),
    ):
        OpenedModel(folder)


def test_contradiction_on_scales_is_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["bnb_4bit_use_double_quant"] = False
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        EspalierError, match=r"model.safetensors: .*disagrees on whether its scales are quantised"
    ):
        OpenedModel(folder)


def test_configuration_alone_makes_no_nf4_model(
    saved: Callable[[str], Path], folder: Path, tmp_path: Path
) -> None:
    directory = shutil.copytree(saved("llama"), tmp_path / "saved")
    shutil.copyfile(folder / "config.json", directory / "config.json")
    with pytest.raises(
        EspalierError, match=r"quantization_config in config.json is set, but no matrix is in NF4"
    ):
        OpenedModel(directory)
    assert isinstance(OpenedModel(folder).checkpoint, QuantisedCheckpoint)
