"""Importance matrices of runs: values in the file, refusals, and a real llama.cpp.

``LLAMA_QUANTIZE`` may name llama.cpp's program ``llama-quantize``:

    LLAMA_QUANTIZE=/path/llama-quantize pytest -m slow tests/results/test_imatrix_export.py

The npm package ``node-llama-cpp`` has the libraries of a release (B, the directory
``@node-llama-cpp/linux-x64/bins/linux-x64``) and its source, from which the program is built:

    git clone node_modules/node-llama-cpp/llama/gitRelease.bundle llama.cpp && cd llama.cpp
    g++ -O1 -std=c++17 -Icommon -Iinclude -Iggml/include -Ivendor tools/quantize/*.cpp -L$B
    -l:libllama-common.so -l:libllama.v0.5.0.so -l:libggml.v0.5.0.so -l:libggml-base.so
    -Wl,-rpath,$B -lpthread -o llama-quantize
"""

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from espalier.hf.opening.opened_model import OpenedModel
from espalier.methods.pruning.pooled_pruning import shared_inputs
from espalier.results.finished_run import open_run
from espalier.results.input_sums import read_sums, write_sums
from tests.results.made_runs import masked_run, tuned_run
from tests.results.test_export_command import export
from tests.tiny_model import save_tiny_llama

QUANTIZE = os.environ.get("LLAMA_QUANTIZE", "")


def run_with_sums(folder: Path, base: Path, count: int = 64) -> Path:
    """Return a made run with random sums of squared inputs."""
    run = masked_run(folder, base)
    plan = OpenedModel(run / "model").plan
    generator = torch.Generator().manual_seed(0)
    sums = {
        block.index: {
            name: torch.rand(block.linear(name).shape[1], generator=generator).double() * 100
            for name in set(shared_inputs(block).values())
        }
        for block in plan.blocks
    }
    write_sums(
        run, plan, sums.__getitem__, [count + block for block in range(len(plan.blocks))], 16
    )
    return run


def test_file_has_sums_and_counts_under_names_of_llama_cpp(tmp_path: Path) -> None:
    from gguf import GGUFReader

    base = save_tiny_llama(tmp_path / "base")
    run = run_with_sums(tmp_path / "runs" / "a", base)
    assert export(run, "imatrix", tmp_path / "out") == 0
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["imatrix.gguf"]
    reader = GGUFReader(tmp_path / "out" / "imatrix.gguf")
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.type"] == "imatrix"
    assert fields["imatrix.datasets"] == ["calibration samples of the clients of a"]
    assert (fields["imatrix.chunk_count"], fields["imatrix.chunk_size"]) == (4, 16)
    tensors = {tensor.name: np.asarray(tensor.data) for tensor in reader.tensors}
    found = read_sums(open_run(run), OpenedModel(base).plan)
    expected = {
        f"blk.{block.index}.{name}.weight": found.sums[block.linear(linear).parameter]
        for block in OpenedModel(base).plan.blocks
        for linear, name in {
            "attn.q": "attn_q", "attn.k": "attn_k", "attn.v": "attn_v", "attn.o": "attn_output",
            "mlp.gate": "ffn_gate", "mlp.up": "ffn_up", "mlp.down": "ffn_down",
        }.items()
    }  # fmt: skip
    assert set(tensors) == {f"{name}.{kind}" for name in expected for kind in ("in_sum2", "counts")}
    for name, sums in expected.items():
        assert tensors[f"{name}.in_sum2"].tolist() == sums.float().tolist()
        # A client was lost before the second block, so the counts differ.
        assert tensors[f"{name}.counts"].tolist() == [64.0 + int(name.split(".")[1])]


def test_runs_without_sums_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = save_tiny_llama(tmp_path / "base", dtype=torch.float32)
    run, _ = tuned_run(tmp_path / "runs" / "b", str(base))
    assert export(run, "imatrix", tmp_path / "out") == 2
    assert "has no input-sums.safetensors" in capsys.readouterr().err
    assert export(base, "imatrix", tmp_path / "out") == 2
    assert "--to imatrix needs a run of pooled-pruning" in capsys.readouterr().err
    assert export(run, "imatrix", tmp_path / "out", adapter=True) == 2
    assert "--adapter: does not apply to --to imatrix" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_damaged_sums_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_with_sums(tmp_path / "runs" / "a", save_tiny_llama(tmp_path / "base"))
    file = run / "input-sums.safetensors"
    file.write_bytes(file.read_bytes()[:-7])
    assert export(run, "imatrix", tmp_path / "out") == 2
    assert "input-sums.safetensors: cannot be read" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(not QUANTIZE, reason="LLAMA_QUANTIZE names no llama-quantize")
def test_llama_quantize_uses_the_matrix(tmp_path: Path) -> None:
    """IQ2_XXS is refused without an importance matrix, and made with it."""
    # Rows of this format have a multiple of 256 weights.
    base = save_tiny_llama(tmp_path / "base", hidden=256, feed_forward=256)
    run = run_with_sums(tmp_path / "runs" / "a", base)
    assert export(run, "gguf", tmp_path / "model", dtype="float32") == 0
    assert export(run, "imatrix", tmp_path / "matrix") == 0
    model = str(tmp_path / "model" / "model.gguf")
    small = str(tmp_path / "small.gguf")
    without = subprocess.run([QUANTIZE, model, small, "IQ2_XXS"], capture_output=True, text=True)
    assert without.returncode != 0
    matrix = ["--imatrix", str(tmp_path / "matrix" / "imatrix.gguf")]
    found = subprocess.run(
        [QUANTIZE, *matrix, model, small, "IQ2_XXS"], capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
    assert "have 14 importance matrix entries" in found.stdout
