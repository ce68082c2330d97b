"""``espalier plan``: models with only a configuration, printed text, and estimated memory."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from espalier.errors import EspalierError
from espalier.hf.machine.computing import Computing
from espalier.hf.machine.machine_memory import resident
from espalier.hf.machine.traced_memory import LiveBytes
from espalier.hf.opening.config_only_model import described
from espalier.hf.opening.opened_model import OpenedModel, model_folder
from espalier.hf.whole.adapters import put_in
from espalier.hf.whole.model import load_whole
from espalier.methods.tuning.adapters.tensors import trained
from espalier.settings.keys import default_values
from espalier.settings.registry import METHODS
from espalier.settings.run import parse
from server_app.estimate.command import main
from server_app.estimate.estimate import Plan, Speeds
from server_app.estimate.record import FILE, record_peak
from server_app.estimate.start_summary import tell_plan, tell_time_of_sites
from server_app.estimate.work.memory import Memory, Moment
from server_app.estimate.work.step_memory import FEW, step_bytes
from server_app.public_tests import PublicTests
from strategies.base.roster import Seat
from tests.tiny_model import save_tiny_llama

LLAMA_7B = {
    "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "vocab_size": 32000,
}  # fmt: skip
WEIGHTS_OF_A_BLOCK = 4 * 4096 * 4096 + 3 * 4096 * 11008

COMPUTING = Computing(torch.device("cpu"), torch.float32, 1)


@pytest.fixture(scope="module")
def seven_billion(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama-7b")
    LlamaConfig(**LLAMA_7B, dtype="bfloat16", architectures=["LlamaForCausalLM"]).save_pretrained(
        folder
    )
    return folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"), blocks=5, hidden=64, feed_forward=64)


def settings_of(model: Path, **changes: Any) -> Any:
    given = {key.replace("__", ".").replace("_", "-"): value for key, value in changes.items()}
    return parse(
        {"model": str(model), "data.sequence-length": 16, "evaluation.sequence-length": 16, **given}
    )


def test_7b_model_is_planned_from_its_config(seven_billion: Path) -> None:
    """A mask has one bit per weight of 32 blocks.

    The placeholder of the weights takes almost no disk space, and no weight is made.
    """
    with described(seven_billion) as folder:
        weights = (folder / "model.safetensors").stat()
        assert weights.st_size > 13_400_000_000 > 1000 * 512 * weights.st_blocks
        plan = Plan(settings_of(folder, method="fedprllm", dtype="bfloat16"), OpenedModel(folder))
        mask_bytes = 32 * WEIGHTS_OF_A_BLOCK // 8
        assert mask_bytes < plan.traffic.of_client(0).up < 1.0001 * mask_bytes
        block = 2 * (WEIGHTS_OF_A_BLOCK + 2 * 4096)
        assert plan.client.libraries + block < plan.client.peak < plan.client.libraries + 6 * block
        assert plan.server_disk["model/"] == 2 * plan.model.plan.num_parameters
    assert not folder.exists()


def test_model_with_weights_is_opened_in_place(tiny: Path) -> None:
    with described(tiny) as folder:
        assert folder == tiny


def test_holes_have_what_the_weights_have(tiny: Path, tmp_path: Path) -> None:
    alone = tmp_path / "local_baseline"
    shutil.copytree(tiny, alone, ignore=shutil.ignore_patterns("*.safetensors*"))
    real = OpenedModel(tiny)
    with described(alone) as folder:
        made = OpenedModel(folder)
        assert made.plan == real.plan
        found = {name: (one.dtype, one.shape) for name, one in made.checkpoint.tensors.items()}
        assert found == {
            name: (one.dtype, one.shape) for name, one in real.checkpoint.tensors.items()
        }


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({}, "has no config.json; name the directory of a Hugging Face model"),
        ({"config.json": "[]"}, "instead of keys and values"),
        ({"config.json": "{"}, "is not a JSON file: "),
        ({"config.json": '{"model_type": "unheard"}'}, "unheard"),
        (
            {"config.json": '{"model_type": "llama"}', "model-00001.safetensors": ""},
            "contains neither model.safetensors nor .*, but model-00001.safetensors",
        ),
        (
            {"config.json": "{}", "structure.json": "{}"},
            "contains a smaller model without its weights",
        ),
    ],
)
def test_what_is_no_model_is_told(files: dict[str, str], why: str, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(EspalierError, match=why), described(tmp_path) as folder:
        OpenedModel(folder)


@pytest.mark.parametrize("part_bytes", [2048, 2**30])
def test_arriving_model_has_its_size_and_a_piece(part_bytes: int, tiny: Path) -> None:
    given = {
        "method": "fedsoda",
        "fedsoda__emulator": "stored",
        "fedsoda__groups": 1,
        "fedsoda__adapter_layers": 1,
    }
    settings = settings_of(tiny, part_bytes=part_bytes, fedsoda__group_layers=1, **given)
    plan = Plan(settings, OpenedModel(tiny))
    size = plan.server_disk["sub-model/"]
    assert 2048 < size < 2**30
    found = plan.client_disk
    assert found["the sub-model, and a piece of it"] == size + min(size, part_bytes)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_planned(
    method: str, tiny: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text("alder birch cedar " * 500)
    flat = {
        **default_values(), "method": method, "model": str(tiny), "data.sequence-length": 16,
        "evaluation.sequence-length": 16, "fedsoda.group-layers": 1, "fedsoda.groups": 1,
        "fedsoda.adapter-layers": 1, "public.text": str(tmp_path / "text.txt"),
        "lora.targets": "attn.q,attn.o,mlp.up,mlp.down",
    }  # fmt: skip
    assert main({"run": flat, "teraflops": 1.0, "megabits": 50.0}) == 0
    printed = capsys.readouterr().out
    for words in (
        "Bytes of one client",
        "Memory, resident",
        "the SuperLink",
        "Disk, at its fullest",
        "Time, an estimate",
    ):
        assert words in printed
    assert "with 1 teraflops (stated) and 50 megabits per second" in printed


@pytest.mark.parametrize("layers", ["all", "3-4"])
def test_gates_alone_keep_activations_of_all_blocks(tiny: Path, layers: str) -> None:
    """Masks without adapters need less than with adapters, and as much with few adapted blocks."""

    def step(**changes: Any) -> int:
        settings = settings_of(tiny, method="sft-p", lora__targets="all", **changes)
        plan = Plan(settings, OpenedModel(tiny))
        (found,) = {
            moment.parts["a step"] for moment in plan.work.worked() if "a step" in moment.parts
        }
        return found

    masks = step(sft_p__adapters=False)
    assert 0 < masks <= step(lora__layers=layers)
    assert step(sft_p__adapters=False, lora__layers=layers) == masks


def test_model_of_a_run_is_planned(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "model").symlink_to(tiny)
    lengths = {"data.sequence-length": 16, "evaluation.sequence-length": 16}
    assert main({"run": {"model": str(tmp_path), **lengths}}) == 0
    (tmp_path / "model").unlink()
    with pytest.raises(EspalierError, match=r"the run wrote no model/; .* espalier export "):
        model_folder(str(tmp_path))


def test_mistakes_are_told(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = {"data.sequence-length": 65, "evaluation.sequence-length": 16}
    assert main({"run": {"model": str(tiny), **lengths}}) == 2
    assert "data.sequence-length = 65: the model has 64 positions" in capsys.readouterr().err
    assert main({"run": {"model": str(tiny / "nowhere")}}) == 2
    assert "nowhere" in capsys.readouterr().err


def test_method_checks_config_without_tokenizer(
    tiny: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shutil.copy(tiny / "config.json", tmp_path)
    settings = {"method": "fedspine", "lora.targets": "attn.q", "pruning.selection": "global"}
    settings |= {"data.sequence-length": 16, "evaluation.sequence-length": 16}
    assert main({"run": settings | {"model": str(tmp_path)}}) == 2
    assert "fedspine measures channels by adapters that lie on them" in capsys.readouterr().err


@pytest.fixture(scope="module")
def small_run(tiny: Path) -> tuple[Any, OpenedModel, PublicTests]:
    """Settings, model and evaluation texts of a run."""
    settings = settings_of(tiny, method="fedprllm", num_clients=3)
    return settings, OpenedModel(tiny), PublicTests({"documentation": torch.zeros(2, 16).long()})


def test_a_run_tells_its_plan_in_a_few_lines(
    small_run: tuple[Any, OpenedModel, PublicTests],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A simulation's time is its operations divided by the speed of this machine."""
    operations = Plan(*small_run).work.operations()
    monkeypatch.setattr(
        "server_app.estimate.start_summary.measured_capability",
        lambda _: operations / 1e9 / 5420,
    )
    tell_plan(*small_run, COMPUTING, simulation=True)
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.startswith("planned      messages: ")
    assert "per client" in second
    assert third.startswith("planned      time: a client's round 1 h 30 min of computing at")
    tell_plan(*small_run, COMPUTING, simulation=False)
    printed = capsys.readouterr().out
    assert "of the SuperLink and" in printed
    assert "at 0.05 teraflops and 100 megabits per second" in printed


def test_a_run_records_its_plan(
    small_run: tuple[Any, OpenedModel, PublicTests], tmp_path: Path
) -> None:
    record_peak(tmp_path)
    assert not (tmp_path / FILE).exists()
    tell_plan(*small_run, COMPUTING, simulation=True, folder=tmp_path)
    found = json.loads((tmp_path / FILE).read_text())
    plan = Plan(*small_run)
    total = plan.traffic.total()
    assert (found["bytes_up"], found["bytes_down"]) == (total.up, total.down)
    assert sum(kind["up"] for kind in found["bytes_by_kind"].values()) == total.up
    assert (found["client_memory"], found["server_memory"]) == (plan.client.peak, plan.server.peak)
    assert "measured" not in found
    # A resumed run keeps the estimate that it began with.
    tell_plan(*small_run, COMPUTING, simulation=False, folder=tmp_path)
    assert json.loads((tmp_path / FILE).read_text()) == found
    record_peak(tmp_path)
    measured = json.loads((tmp_path / FILE).read_text())["measured"]
    assert measured["server_memory"] >= resident()
    assert "client_memory" not in measured
    # The highest of a resumed run's processes counts.
    for peak in (5000, 3000):
        record_peak(tmp_path, peak)
    assert json.loads((tmp_path / FILE).read_text())["measured"]["client_memory"] == 5000


def test_deployment_tells_its_slowest_site(
    small_run: tuple[Any, OpenedModel, PublicTests], capsys: pytest.CaptureFixture[str]
) -> None:
    """Measured capabilities are in units of speed; a stated capability has no unit."""
    giga = Plan(*small_run, simulation=False).work.operations() / 1e9
    seats = [
        Seat(0, "a", 1, capability=giga / 50, measured=True),
        Seat(1, "b", 2, capability=giga / 7200, measured=True),
        Seat(2, "c", 3, capability=giga / 90_000),
    ]
    tell_time_of_sites(*small_run, seats)
    assert "a client's round 2 h at b, the slowest" in capsys.readouterr().out
    tell_time_of_sites(*small_run, seats[2:])
    assert capsys.readouterr().out == ""


def test_a_forecast_never_fails_a_run(
    small_run: tuple[Any, OpenedModel, PublicTests],
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_: Plan, __: Speeds) -> str:
        raise ZeroDivisionError

    monkeypatch.setattr(Plan, "short", fail)
    with caplog.at_level(logging.DEBUG, "espalier"):
        tell_plan(*small_run, COMPUTING, simulation=True)
    assert (
        capsys.readouterr().out
        == "planned      nothing: the forecast failed, which does not affect the run\n"
    )
    assert "no plan" in caplog.text


def test_live_bytes_are_those_of_live_tensors() -> None:
    held = torch.zeros(1000)
    with LiveBytes([held]) as live:
        doubled = held * 2
        view = doubled.view(10, 100)
        assert live.now == 4000
        other = held + 1
        assert live.now == live.most == 8000
        del doubled, view, other
        assert (live.now, live.most) == (0, 8000)


def test_step_of_many_blocks_follows_from_few(tiny: Path) -> None:
    """The estimate has the tensors that autograd saves in a real step, and the loss's gradient.

    Tensors are identified by the address of their memory.
    """
    settings = settings_of(tiny, method="fedpetuning")
    model = OpenedModel(tiny)
    adapters = trained(model.plan, settings)
    blocks = len(model.plan.blocks)
    assert blocks > FEW + 1
    whole = load_whole(model, COMPUTING, "float32")
    put_in(whole, model.family, adapters, blocks, dropout=0.0)
    held = {tensor.data_ptr() for tensor in (*whole.parameters(), *whole.buffers())}
    saved: dict[int, torch.Tensor] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in held:
            saved[address] = tensor
        return tensor

    tokens = torch.arange(32).view(2, 16)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        logits = whole.train()(input_ids=tokens).logits[:, :-1].flatten(0, 1)
        torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
    expected = sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
    found = step_bytes(model, settings, adapters, torch.float32, 2, 16)
    assert expected < found <= expected + 4 * (4 * 2 * 16 * (model.num_embeddings or 0))


def test_gradient_checkpointing_takes_less(tiny: Path) -> None:
    model = OpenedModel(tiny)
    usual, checked = (
        settings_of(tiny, method="fedpetuning", training__gradient_checkpointing=on)
        for on in (False, True)
    )
    adapters = trained(model.plan, usual)
    sizes = [step_bytes(model, one, adapters, torch.float32, 8, 64) for one in (usual, checked)]
    assert sizes[1] < sizes[0]


def test_the_peak_is_that_of_the_largest_moment() -> None:
    memory = Memory(
        "client", (Moment("one", {"a": 1, "b": 2}), Moment("two", {"a": 2}).plus({"c": 5}))
    )
    assert memory.largest.name == "two"
    assert memory.peak == memory.libraries + 7


def test_seconds_are_those_of_work_and_line() -> None:
    assert Speeds(1.5, 1.0).seconds(3e12, 125_000) == pytest.approx(2.0 + 1.0)


def test_configuration_file_is_left_alone(seven_billion: Path) -> None:
    before = (seven_billion / "config.json").read_text()
    with described(seven_billion):
        pass
    assert json.loads(before) == json.loads((seven_billion / "config.json").read_text())
    assert [file.name for file in seven_billion.iterdir() if file.suffix == ".safetensors"] == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # Rank 2 on two matrices per block, of 64 by 64 and of 32 by 64.
        ({"method": "fedpetuning"}, 5 * 2 * (64 + 64 + 64 + 32)),
        ({"method": "fedpetuning", "fedpetuning__aggregation": "ffa"}, 5 * 2 * (64 + 32)),
        ({"method": "flora"}, 5 * 2 * (64 + 64 + 64 + 32)),
        ({"method": "fed-sb"}, 5 * 2 * 2 * 2),
    ],
)
def test_trained_parameters_are_those_of_a_client(
    tiny: Path, changes: dict[str, Any], expected: int
) -> None:
    """FLoRA's result is folded into the base, and what clients train is not."""
    settings = settings_of(tiny, lora__rank=2, lora__alpha=4.0, **changes)
    text = Plan(settings, OpenedModel(tiny)).long(Speeds(1.0, 1.0))
    assert f"a client trains {expected:,} parameters at most" in text
