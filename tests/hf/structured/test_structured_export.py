"""Smaller models on disk: other libraries load each form and compute the same logits."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from espalier.errors import EspalierError
from espalier.hf.export.model import export_edited
from espalier.hf.families import FAMILIES
from espalier.hf.opening.opened_model import OpenedModel, open_model
from espalier.hf.stream.edits import WeightEdit, dense
from espalier.hf.structured import modeling_structured
from espalier.hf.structured.export import FORMS, best_form, export_structured, possible_forms
from espalier.hf.whole.model import load_whole
from espalier.models.structure import Structure
from tests.hf.structured.structured_models import DECODERS, WITH_RESIDUAL, save, uneven
from tests.hf.tiny_models import CPU, LONG, save_model, tiny_config, token_sequences, whole_model

SAMPLES = token_sequences(2, 8)
CASES = [(name, False) for name in DECODERS] + [(name, True) for name in WITH_RESIDUAL]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: save(tmp_path_factory.mktemp("base"), name) for name in DECODERS}


@torch.no_grad()
def logits(model: OpenedModel) -> Tensor:
    found: Tensor = load_whole(model, CPU, "float32")(input_ids=SAMPLES).logits
    return found


@pytest.mark.parametrize(("name", "residual"), CASES)
@torch.no_grad()
def test_all_possible_forms_give_equal_logits(
    saved: dict[str, Path], tmp_path: Path, name: str, residual: bool
) -> None:
    """Espalier reopens the compact form, whose tensors are the slices of the base.

    The zero-filled form keeps the shapes of the base.
    """
    base = OpenedModel(saved[name])
    small = OpenedModel(base.directory, uneven(base, residual=residual))
    expected = logits(small)
    assert sorted(possible_forms(small)) == ["plain"]
    for form in ("compact", "zero-filled"):
        target = tmp_path / form
        export_structured(small, dense, target, form, card="# smaller")  # type: ignore[arg-type]
        torch.testing.assert_close(
            whole_model(target)(input_ids=SAMPLES).logits, expected, rtol=1e-4, atol=3e-5
        )
        assert (target / "README.md").read_text() == "# smaller"
        assert len(list(target.glob("*.safetensors"))) > 1
    again = OpenedModel(tmp_path / "compact")
    assert (again.plan, again.structure) == (small.plan, small.structure)
    assert torch.equal(logits(again), expected)
    for key in small.checkpoint.tensors:
        assert torch.equal(again.checkpoint.read(key), small.checkpoint.read(key))
    filled = OpenedModel(tmp_path / "zero-filled")
    assert {key: stored.shape for key, stored in filled.checkpoint.tensors.items()} == {
        key: stored.shape for key, stored in base.checkpoint.tensors.items()
    }
    with pytest.raises(
        EspalierError,
        match=r"form = 'plain': its blocks are not alike.*choose 'auto' or 'compact' or 'zero-",
    ):
        export_structured(small, dense, tmp_path / "plain", "plain")


@pytest.mark.parametrize("name", DECODERS)
@torch.no_grad()
def test_equal_blocks_are_written_in_plain_form(
    saved: dict[str, Path], tmp_path: Path, name: str
) -> None:
    base = OpenedModel(saved[name])
    groups = {"groups": range(2)} if name not in ("olmo2", "opt") else {}
    kept = {index: {"channels": range(index, index + 20), **groups} for index in range(4)}
    small = OpenedModel(
        base.directory, Structure.whole(base.plan).keeping(kept).with_blocks([1, 3])
    )
    assert best_form(small) == "plain"
    export_structured(small, dense, tmp_path / "plain", "plain")
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert config["model_type"] == base.config["model_type"]
    assert not config.keys() & {"structure", "per_layer_config", "auto_map"}
    assert not list((tmp_path / "plain").glob("*.py"))
    torch.testing.assert_close(
        whole_model(tmp_path / "plain")(input_ids=SAMPLES).logits,
        logits(small),
        rtol=1e-5,
        atol=1e-5,
    )
    assert OpenedModel(tmp_path / "plain").plan.num_parameters == small.plan.num_parameters


def test_exported_code_knows_family_paths() -> None:
    """The exported code cannot import Espalier, so it names the paths a second time."""
    by_type = {
        name: family for family in FAMILIES if not family.experts for name in family.model_types
    }
    kinds = modeling_structured.CLASSES.keys()
    assert kinds == by_type.keys() | {f"structured-{kind}" for kind in by_type}
    for kind, cls in modeling_structured.CLASSES.items():
        family = by_type[kind.removeprefix("structured-")]
        assert (cls.paths, cls.blocks) == (dict(family.linears), family.blocks)


@pytest.mark.parametrize(
    ("name", "possible"),
    [
        *((name, True) for name in ("llama", "granite", "smollm3", "opt")),
        *((name, False) for name in ("qwen3", "mistral", "phi3", "gemma2", "gemma3_text", "olmo2")),
    ],
)
@torch.no_grad()
def test_added_biases_are_in_every_possible_form(
    saved: dict[str, Path], tmp_path: Path, name: str, possible: bool
) -> None:
    base = OpenedModel(saved[name])
    cut = uneven(base, drop=False)
    structure = replace(cut, added_biases=("attn.o", "mlp.down"))
    paths = [base.family.linears[linear] for linear in structure.added_biases]
    given = {
        f"{base.family.blocks}.{index}.{path}.bias": torch.full((32,), 0.1 * index)
        for index in range(4)
        for path in paths
    }
    small = OpenedModel(base.directory, structure, given)
    expected = logits(small)
    assert not torch.allclose(expected, logits(OpenedModel(base.directory, cut)))
    assert ("zero-filled" not in possible_forms(small)) == possible
    for form in FORMS:
        if form not in possible_forms(small):
            export_structured(small, dense, tmp_path / form, form)
            found = whole_model(tmp_path / form)(input_ids=SAMPLES).logits
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    if not possible:
        with pytest.raises(
            EspalierError, match=f"'zero-filled': transformers' {base.family.name} has no bias at"
        ):
            export_structured(small, dense, tmp_path / "filled", "zero-filled")


class Doubled:
    """Edit that doubles a weight."""

    def __call__(self, weight: Tensor) -> Tensor:
        return weight * 2


def test_a_smaller_model_is_edited_and_cut_again(saved: dict[str, Path], tmp_path: Path) -> None:
    """A tuned smaller model has such an export as its base."""
    base = OpenedModel(saved["qwen2"])
    small = OpenedModel(base.directory, uneven(base))
    export_structured(small, dense, tmp_path / "small", "compact")

    def edits(index: int) -> dict[str, WeightEdit]:
        return {"mlp.up": Doubled()} if index == 1 else {}

    again = OpenedModel(tmp_path / "small")
    export_edited(again, edits, tmp_path / "edited")
    edited = OpenedModel(tmp_path / "edited")
    assert edited.structure == small.structure
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(edited.checkpoint.read(name), 2 * small.checkpoint.read(name))
    third = OpenedModel(tmp_path / "small", Structure.whole(again.plan).with_blocks([0, 2]))
    export_structured(third, dense, tmp_path / "third", "compact")
    assert [block.source for block in OpenedModel(tmp_path / "third").structure.blocks] == [0, 3]  # type: ignore[union-attr]
    torch.testing.assert_close(logits(OpenedModel(tmp_path / "third")), logits(third))
    with pytest.raises(
        EspalierError, match="holds a smaller model itself, and what was cut from it is not there"
    ):
        export_structured(third, dense, tmp_path / "filled", "zero-filled")


@pytest.mark.parametrize("spoil", ["remove", "other", "text"])
def test_structure_must_match_the_files(saved: dict[str, Path], tmp_path: Path, spoil: str) -> None:
    base = OpenedModel(saved["llama"])
    export_structured(
        OpenedModel(base.directory, uneven(base)), dense, tmp_path / "small", "compact"
    )
    path = tmp_path / "small" / "structure.json"
    document = json.loads(path.read_text())
    document["blocks"][0]["groups"] = "0"
    texts = {"other": json.dumps(document), "text": "{"}
    path.unlink() if spoil == "remove" else path.write_text(texts[spoil])
    with pytest.raises(
        EspalierError, match=r"structure.json: .*; copy (it again|the file again|both)"
    ):
        OpenedModel(tmp_path / "small")


def test_run_directory_opens_as_its_model(saved: dict[str, Path], tmp_path: Path) -> None:
    base = OpenedModel(saved["llama"])
    export_structured(
        OpenedModel(base.directory, uneven(base)), dense, tmp_path / "model", "compact"
    )
    (tmp_path / "run.json").write_text("{}")
    assert open_model(str(tmp_path)).directory == tmp_path / "model"
    (tmp_path / "run.json").unlink()
    with pytest.raises(EspalierError, match=r"has no config\.json"):
        open_model(str(tmp_path))


def test_opening_asks_for_no_custom_code(saved: dict[str, Path], tmp_path: Path) -> None:
    """transformers asks whether to run the model's code unless its classes are registered."""
    base = OpenedModel(saved["llama"])
    export_structured(
        OpenedModel(base.directory, uneven(base)), dense, tmp_path / "model", "compact"
    )
    code = (
        "import sys; from espalier.hf.opening.opened_model import open_model;"
        " print(len(open_model(sys.argv[1]).tokenizer))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "model")],
        capture_output=True,
        text=True,
        input="",
    )
    assert (done.returncode, done.stdout) == (0, "96\n"), done.stderr
    assert "custom code" not in done.stderr


@torch.no_grad()
def test_phi_with_long_texts_and_fewer_heads_is_compact(tmp_path: Path) -> None:
    """transformers refuses a plain configuration whose number of heads does not fit its factors."""
    base = OpenedModel(save_model(tmp_path / "base", tiny_config("phi3", **LONG)))
    kept = {index: {"groups": [index], "channels": range(20)} for index in range(2)}
    small = OpenedModel(base.directory, Structure.whole(base.plan).keeping(kept))
    assert best_form(small) == "compact"
    export_structured(small, dense, tmp_path / "compact", "compact")
    found = whole_model(tmp_path / "compact")(input_ids=SAMPLES).logits
    torch.testing.assert_close(found, logits(small), rtol=1e-5, atol=1e-5)
    channels = {index: {"channels": range(20)} for index in range(2)}
    narrow = OpenedModel(base.directory, Structure.whole(base.plan).keeping(channels))
    assert best_form(narrow) == "plain"


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("qwen2", "layer_types"),
        ("gemma2", "layer_types"),
        ("gemma3_text", "layer_types"),
        ("smollm3", "no_rope_layers"),
    ],
)
def test_blocks_keep_their_types(tmp_path: Path, name: str, key: str) -> None:
    """Older files have no list of types, which follow from the blocks' numbers in the base."""
    base = save(tmp_path / "base", name)
    config = json.loads((base / "config.json").read_text())
    types = config.pop(key)
    assert len(set(types)) == 2
    (base / "config.json").write_text(json.dumps(config))
    model = OpenedModel(base)
    small = OpenedModel(base, Structure.whole(model.plan).with_blocks([0, 2, 3]))
    assert small.config[key] == [types[0], types[2], types[3]]
    export_structured(small, dense, tmp_path / "plain", "plain")
    written = whole_model(tmp_path / "plain")
    assert getattr(written.config, key) == [types[0], types[2], types[3]]


def test_plain_cut_of_compact_needs_no_code(saved: dict[str, Path], tmp_path: Path) -> None:
    base = OpenedModel(saved["llama"])
    alike = Structure.whole(base.plan).keeping(
        {index: {"channels": list(range(32))} for index in range(4)}
    )
    export_structured(OpenedModel(base.directory, alike), dense, tmp_path / "compact", "compact")
    compact = OpenedModel(tmp_path / "compact")
    smaller = OpenedModel(compact.directory, Structure.whole(compact.plan).with_blocks([0, 3]))
    assert best_form(smaller) == "plain"
    export_structured(smaller, dense, tmp_path / "plain", "plain")
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert (config.get("auto_map"), config["architectures"], config["model_type"]) == (
        None,
        ["LlamaForCausalLM"],
        "llama",
    )
    assert not list((tmp_path / "plain").glob("*.py"))
    torch.testing.assert_close(whole_model(tmp_path / "plain")(SAMPLES).logits, logits(smaller))
