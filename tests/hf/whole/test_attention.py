"""Implementation of attention, as the settings choose it."""

from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch

from espalier.errors import EspalierError
from espalier.hf.machine import computing as module
from espalier.hf.machine.computing import set_up
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.stream.block_stream import BlockStream, run_through
from espalier.hf.whole.model import load_whole
from espalier.settings.node import NodeSettings
from espalier.settings.run import parse
from tests.hf.tiny_models import llama_config, save_model, token_sequences, whole_model


def test_stream_and_whole_model_use_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = OpenedModel(save_model(tmp_path / "model", llama_config()))
    samples = token_sequences(2, 9)
    expected = whole_model(model.directory)(input_ids=samples).logits
    used = []
    eager = torch.nn.functional.softmax

    def softmax(*arguments: object, **named: object) -> torch.Tensor:
        used.append(True)
        return eager(*arguments, **named)  # type: ignore[arg-type]

    # Only eager attention calls softmax.
    monkeypatch.setattr(torch.nn.functional, "softmax", softmax)
    for attention in ("sdpa", "eager"):
        used.clear()
        computing = set_up(parse({"attention": attention, "device": "cpu"}), tmp_path)
        stream = BlockStream(model, computing)
        streamed = torch.cat(list(stream.logits(run_through(stream, samples))))
        whole = load_whole(model, computing, "float32")(input_ids=samples).logits
        for found in (streamed, whole.flatten(0, 1)):
            torch.testing.assert_close(found.view_as(expected), expected, rtol=1e-4, atol=1e-4)
        assert len(used) == (2 * 3 if attention == "eager" else 0)


def test_a_site_has_its_own(tmp_path: Path) -> None:
    settings = parse({"attention": "eager"})
    assert set_up(settings, tmp_path, NodeSettings(attention="sdpa")).attention == "sdpa"
    assert set_up(settings, tmp_path, NodeSettings()).attention == "eager"


@pytest.mark.parametrize(
    ("settings", "installed", "error"),
    [
        ({"device": "cpu"}, True, "needs a CUDA device"),
        ({"device": "cuda"}, False, "flash-attn is not installed"),
        ({"device": "cuda"}, True, "does not compute in dtype = 'float32'; set dtype"),
        (
            {"device": "cuda", "method": "fedpetuning", "dtype": "bfloat16"},
            True,
            r"does not compute in training\.base = 'float32'; set training\.base",
        ),
        (
            {"device": "cuda", "method": "fedpetuning", "training.base": "nf4"},
            True,
            "does not compute in dtype = 'float32'; set dtype",
        ),
        (
            {
                "device": "cuda",
                "method": "fedpetuning",
                "training.base": "bfloat16",
                "task.packing": True,
            },
            True,
            r"does not separate packed records \(task\.packing\)",
        ),
        ({"device": "cuda", "dtype": "bfloat16"}, True, ""),
    ],
)
def test_flash_attention_is_refused_where_it_cannot_run(
    settings: dict[str, Any],
    installed: bool,
    error: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = ModuleSpec("flash_attn", None) if installed else None
    monkeypatch.setattr(module, "find_spec", lambda _: found)
    chosen = parse(settings | {"attention": "flash_attention_2"})
    if not error:
        assert set_up(chosen, tmp_path).attention == "flash_attention_2"
        return
    with pytest.raises(EspalierError, match=error):
        set_up(chosen, tmp_path)
