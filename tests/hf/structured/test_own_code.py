"""Models with unequal blocks or a sliced stream load with the code in their own directory.

The loading process cannot import Espalier.
"""

import subprocess
import sys
from pathlib import Path

import torch

from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.sliced.export import export_sliced
from espalier.hf.sliced.rotated_checkpoint import SlicedModel
from espalier.hf.sliced.signals import basis_of, mean_moments
from espalier.hf.stream.block_stream import BlockStream
from espalier.hf.stream.edits import dense
from espalier.hf.structured.export import export_structured
from espalier.hf.whole.model import load_whole
from tests.hf.structured.structured_models import save, uneven
from tests.hf.tiny_models import CPU, token_sequences

WITHOUT_ESPALIER = """
import sys, torch
from transformers import AutoModelForCausalLM
samples = torch.load("samples.pt")
for path in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True, \
dtype=torch.float32).eval()
    torch.save(model(input_ids=samples).logits, f"{path}.pt")
assert not any(name.startswith("espalier") for name in sys.modules)
"""


@torch.no_grad()
def test_models_are_loaded_by_their_own_code(tmp_path: Path) -> None:
    samples = token_sequences(6, 20)
    torch.save(samples, tmp_path / "samples.pt")
    base = OpenedModel(save(tmp_path / "llama", "llama"))
    export_structured(
        OpenedModel(base.directory, uneven(base, residual=True)),
        dense,
        tmp_path / "compact",
        "compact",
    )
    model = OpenedModel(save(tmp_path / "qwen3", "qwen3"))
    bases = [basis_of(moments, 24)[0] for moments in mean_moments(BlockStream(model, CPU), samples)]
    export_sliced(SlicedModel(model, bases.__getitem__, 24), tmp_path / "sliced")
    command = [sys.executable, "-I", "-c", WITHOUT_ESPALIER, "compact", "sliced"]
    environment = {"HOME": str(tmp_path), "HF_HOME": str(tmp_path / "hub"), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    for name in ("compact", "sliced"):
        expected = load_whole(OpenedModel(tmp_path / name), CPU, "float32")(
            input_ids=samples
        ).logits
        torch.testing.assert_close(torch.load(tmp_path / f"{name}.pt"), expected)
