"""Gated residual dimensions (DISP-LLM) and the dense models they compile to.

Both give the same logits and the same tokens, and the model has the counted parameters.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

from espalier.errors import EspalierError
from espalier.hf.machine.computing import Computing
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.stream.block_stream import BlockStream, run_through
from espalier.hf.stream.edits import dense
from espalier.hf.structured.export import export_structured
from espalier.hf.structured.residual_gates import Gate, Norm, ResidualGates, Routing
from espalier.hf.structured.selection import cut_adapter_plan, cut_trained
from espalier.hf.whole.adapters import merged
from espalier.hf.whole.model import load_whole
from espalier.models.adapters import adapter_plan
from espalier.settings.run import parse
from espalier.settings.tables.lora import LoraSettings
from espalier.training.adapted_model import AdaptedModel
from tests.hf.tiny_models import tiny_config
from tests.tiny_model import save_tokenizer

CPU = Computing(torch.device("cpu"), torch.float32, 1)
KINDS = ("llama", "qwen2", "mistral", "granite", "smollm3", "gemma2", "gemma3_text")


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OpenedModel:
    folder = tmp_path_factory.mktemp(request.param)
    sizes = {"vocab_size": save_tokenizer(folder), "num_hidden_layers": 3, "head_dim": 8}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = AutoModelForCausalLM.from_config(tiny_config(request.param, **sizes))
        for parameter in made.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
    made.save_pretrained(folder)
    return OpenedModel(folder)


def random_gates(gates: ResidualGates, share: float, seed: int = 0) -> dict[Gate, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = {gate: torch.randn(width, generator=generator) for gate, width in gates.widths.items()}
    return gates.chosen(logits, gates.target(share, "blocks"))


def samples(number: int = 3) -> Tensor:
    return torch.randint(3, 260, (number, 10), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize(("share", "norm"), [(0.2, "all"), (0.5, "all"), (0.5, "read")])
def test_routed_equals_compiled(
    model: OpenedModel, share: float, norm: Norm, tmp_path: Path
) -> None:
    """Compare logits to 1e-5, tokens generated with a KV cache, and numbers of parameters."""
    gates = ResidualGates(model.plan)
    chosen = random_gates(gates, share)
    smaller = OpenedModel(model.directory, gates.structure(chosen, norm_of_read=norm == "read"))
    whole = load_whole(model, CPU, "float32")
    routing = Routing(whole, model.family, len(model.plan.blocks), norm)
    export_structured(smaller, dense, tmp_path / "compiled", "compact")
    compiled = AutoModelForCausalLM.from_pretrained(
        tmp_path / "compiled", trust_remote_code=True
    ).eval()
    with torch.no_grad():
        plain = whole(samples()).logits
        with routing.by({gate: own.float() for gate, own in chosen.items()}):
            routed = whole(samples()).logits
            tokens = whole.generate(samples(1), max_new_tokens=12, do_sample=False)
        # Without gates, nothing is routed.
        assert torch.equal(whole(samples()).logits, plain)
        torch.testing.assert_close(compiled(samples()).logits, routed, rtol=0, atol=1e-5)
        assert torch.equal(
            compiled.generate(samples(1), max_new_tokens=12, do_sample=False), tokens
        )
    counted = sum(linear.num_weights for block in smaller.plan.blocks for linear in block.linears)
    assert counted == int(gates.spent({gate: own.float() for gate, own in chosen.items()}))
    built = sum(
        p.numel() for name, p in compiled.named_parameters() if ".layers." in name and p.ndim == 2
    )
    assert built == counted
    assert 0 <= gates.target(share, "blocks") - counted < max(gates.costs.values())


def test_adapters_follow(model: OpenedModel) -> None:
    """LoRA on all matrices under gates equals the smaller model with slices of the factors."""
    settings = parse(
        {"method": "fedpetuning", "lora.targets": "all", "lora.rank": 2, "lora.alpha": 4.0}
    )
    adapters = adapter_plan(model.plan, LoraSettings(rank=2, alpha=4.0, targets="all"))
    adapted = AdaptedModel.load(model, CPU, settings, adapters)
    gates = ResidualGates(model.plan)
    generator = torch.Generator().manual_seed(2)
    values = {
        key: {name: torch.randn(shape, generator=generator) / 10 for name, shape in own.items()}
        for key, own in adapters.shapes().items()
    }
    adapted.set(values)
    chosen = random_gates(gates, 0.4)
    structure = gates.structure(chosen)
    with (
        torch.no_grad(),
        Routing(adapted.whole, model.family, 3).by(
            {gate: own.float() for gate, own in chosen.items()}
        ),
    ):
        routed = adapted.whole(samples()).logits
    cut = cut_adapter_plan(adapters, model.plan, structure)
    own = cut_trained(values, model.plan, structure)
    stream = BlockStream(OpenedModel(model.directory, structure), CPU)
    edits = merged(cut, own)
    found = torch.cat(list(stream.logits(run_through(stream, samples(), edits))))
    torch.testing.assert_close(found, routed.flatten(0, 1), rtol=0, atol=1e-5)


def test_a_norm_may_see_what_is_read_alone(model: OpenedModel) -> None:
    """Equation 3: the selected dimensions are normalised like a plain RMS norm of that width."""
    gates = ResidualGates(model.plan)
    chosen = random_gates(gates, 0.5)
    whole = load_whole(model, CPU, "float32")
    seen = list[Tensor]()
    norm = whole.model.layers[1].get_submodule(model.family.norms["norm.mlp"])
    is_gemma = model.family.name.startswith("gemma")
    scale = 1 + norm.weight if is_gemma else norm.weight
    epsilon = norm.eps if is_gemma else norm.variance_epsilon
    with (
        torch.no_grad(),
        Routing(whole, model.family, 3, "read").by(
            {gate: own.float() for gate, own in chosen.items()}
        ),
    ):
        norm.register_forward_hook(lambda _, inputs, output: seen.extend((inputs[0], output)))
        whole(samples(1))
    stream, found = seen
    dimensions = chosen[1, "mlp_reads"].nonzero().squeeze(1)
    expected = torch.nn.functional.rms_norm(
        stream[..., dimensions], (len(dimensions),), scale[dimensions], epsilon
    )
    torch.testing.assert_close(found[..., dimensions], expected)
    assert not found[..., ~chosen[1, "mlp_reads"]].any()


@pytest.mark.parametrize(
    ("norm", "kind"), [("all", "mlp_writes"), ("read", "mlp_writes"), ("read", "mlp_reads")]
)
def test_gradients_reach_the_gates(model: OpenedModel, norm: Norm, kind: str) -> None:
    """Compare with finite differences at gates of 0.7, a value that no compiled model has."""
    gates = ResidualGates(model.plan)
    whole = load_whole(model, CPU, "float32").double()
    routing = Routing(whole, model.family, 3, norm)
    at = (1, kind)
    values = {
        gate: torch.full((width,), 0.7, dtype=torch.float64) for gate, width in gates.widths.items()
    }

    def loss(moved: Tensor) -> Tensor:
        with routing.by(values | {at: moved}):
            return whole(samples(1)).logits.log_softmax(-1)[0, :, 5].sum()

    moved = values[at].clone().requires_grad_(True)
    loss(moved).backward()
    assert moved.grad is not None
    for number in (0, 9):
        step = torch.zeros_like(values[at])
        step[number] = 1e-2
        with torch.no_grad():
            slope = (loss(values[at] + step) - loss(values[at] - step)) / 2e-2
        # Norms compute in float32, so the tolerance is wide.
        assert float(moved.grad[number]) == pytest.approx(float(slope), rel=1e-2)


def test_costs_equal_section_5_of_recipe(model: OpenedModel) -> None:
    """Section 5 of the recipe: T(g) = sum of k_ai (q + 2 kv) + k_ao q + 2 f k_fi + f k_fo."""
    q = 32
    kv = 16
    f = 48
    expected = {"attn_reads": q + 2 * kv, "attn_writes": q, "mlp_reads": 2 * f, "mlp_writes": f}
    gates = ResidualGates(model.plan)
    assert gates.costs == {(index, kind): expected[kind] for index in range(3) for kind in expected}
    assert gates.total == sum(
        linear.num_weights for block in model.plan.blocks for linear in block.linears
    )


def test_share_of_model_keeps_rest_whole(model: OpenedModel) -> None:
    gates = ResidualGates(model.plan)
    everything = model.plan.num_parameters
    assert gates.target(0.25, "model") == int(0.75 * everything) - (everything - gates.total)
    with pytest.raises(EspalierError, match=r"pruning.ratio = 0.9 \(sft-p.ratio-of = 'model'\)"):
        gates.target(0.9, "model")


def test_sign_decides_without_budget() -> None:
    class Two(ResidualGates):
        widths = {(0, "attn_reads"): 3, (0, "attn_writes"): 2}  # type: ignore[assignment]  # noqa: RUF012

    logits = {
        (0, "attn_reads"): torch.tensor([-1.0, 0.0, 2.0]),
        (0, "attn_writes"): torch.tensor([-3.0, -1.0]),
    }
    found = Two(None).chosen(logits, None)  # type: ignore[arg-type]
    assert {gate: own.tolist() for gate, own in found.items()} == {
        (0, "attn_reads"): [False, True, True],
        (0, "attn_writes"): [False, True],
    }


def test_a_family_without_residual_dimensions_is_refused() -> None:
    from espalier.hf.families.table import OPT

    config = OPTConfig(
        vocab_size=50, hidden_size=32, ffn_dim=32, num_hidden_layers=1, num_attention_heads=2
    )
    with pytest.raises(EspalierError, match="family opt cannot be routed"):
        Routing(OPTForCausalLM(config), OPT, 1)
