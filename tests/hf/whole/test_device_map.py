"""A model on two devices: the CPU twice, or the CPU and a pretended CUDA device."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate.hooks import AlignDevicesHook

from espalier.data.tasks.encoding import Encoded
from espalier.data.tasks.item import collate
from espalier.errors import EspalierError
from espalier.hf.machine import computing as machine
from espalier.hf.machine.computing import set_up
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.whole import model as module
from espalier.hf.whole.adapters import put_in, set_values
from espalier.hf.whole.device_map import device_of, placement
from espalier.hf.whole.model import load_whole
from espalier.models.adapters import adapter_plan
from espalier.settings.node import NodeSettings
from espalier.settings.run import parse
from espalier.settings.tables.lora import LoraSettings
from espalier.training.initial_values import initial_adapters
from espalier.training.loss import summed_loss
from tests.devices import pretended
from tests.hf.tiny_models import CPU, llama_config, save_model, token_sequences
from tests.pretended_device import DeviceTensor

MIB = 1 << 20
DEVICE = torch.device("cpu")
CUDA = torch.device("cuda", 0)


@pytest.fixture
def model(tmp_path: Path) -> OpenedModel:
    return OpenedModel(save_model(tmp_path / "model", llama_config(num_hidden_layers=6)))


def test_blocks_are_divided_evenly(model: OpenedModel) -> None:
    whole = model.new_skeleton()
    places = placement(whole, model.family, [MIB, MIB], torch.float32)
    devices = [torch.device("cuda", 0), torch.device("cuda", 1)]
    blocks = [device_of(f"model.layers.{number}", places, devices).index for number in range(6)]
    assert blocks == sorted(blocks)
    assert 2 <= sum(blocks) <= 4
    assert device_of("model.embed_tokens", places, devices).index == 0
    assert device_of("lm_head", places, devices).index == 1
    inner = device_of("model.layers.5.self_attn.q_proj", places, devices)
    assert inner.index == blocks[5]


def test_a_model_that_does_not_fit_is_refused(model: OpenedModel) -> None:
    whole = model.new_skeleton()
    size = 4 * sum(value.numel() for value in whole.parameters())
    with pytest.raises(EspalierError, match=r"device-map = 'auto': the model has .* GiB"):
        placement(whole, model.family, [size // 3, size // 3], torch.float32)
    # In four bits it fits.
    placement(whole, model.family, [size // 3, size // 3], torch.float32, nf4=True)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("devices", [(DEVICE, DEVICE), (DEVICE, CUDA), (CUDA, DEVICE)])
def test_loss_and_gradients_are_those_of_one_device(
    devices: tuple[torch.device, torch.device],
    tied: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pretended CUDA device refuses operations that mix tensors of two devices."""
    config = llama_config(num_hidden_layers=6, tie_word_embeddings=tied)
    model = OpenedModel(save_model(tmp_path / "tied", config))
    monkeypatch.setattr(module, "free_bytes", lambda _: MIB)
    adapters = adapter_plan(model.plan, LoraSettings(rank=2, dropout=0.0))
    rows = [Encoded(tuple(row), 4) for row in token_sequences(3, 9).tolist()]
    # accelerate compares the addresses of tied weights.
    monkeypatch.setattr(DeviceTensor, "data_ptr", lambda self: self.inner.data_ptr(), raising=False)
    found = {}
    mixed = len(set(devices)) > 1
    for name, computing in (("one", CPU), ("two", replace(CPU, spread=devices))):
        with pretended() if mixed and name == "two" else nullcontext():
            whole = load_whole(model, computing, "float32")
            hooks = [getattr(part, "_hf_hook", None) for part in whole.modules()]
            assert any(isinstance(hook, AlignDevicesHook) for hook in hooks) == (name == "two")
            parameters = put_in(whole, model.family, adapters, 6, 0.0)
            set_values(parameters, initial_adapters(adapters, 3))
            loss = summed_loss(whole, collate(rows, 0), DEVICE)
            loss.backward()
            values = [value for block in parameters.values() for value in block.values()]
            places = {value.device.type for value in values}
            assert places == ({"cpu", "cuda"} if mixed and name == "two" else {"cpu"})
            found[name] = (loss.item(), [value.grad.cpu() for value in values])
    assert found["two"][0] == found["one"][0]
    for one, two in zip(found["one"][1], found["two"][1], strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0)


def test_only_a_node_with_several_devices_spreads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for number, device_map, expected in ((2, "auto", 2), (1, "auto", 0), (2, "one", 0)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda number=number: number)
        node = NodeSettings(device_map=device_map)
        assert len(set_up(parse({}), tmp_path, node).spread) == expected
    monkeypatch.setattr(machine.torch.cuda, "mem_get_info", lambda _: (7, 9))
    assert machine.free_bytes(torch.device("cuda", 1)) == 7
    assert set_up(parse({"device": "cpu"}), tmp_path, NodeSettings(device_map="auto")).spread == ()
