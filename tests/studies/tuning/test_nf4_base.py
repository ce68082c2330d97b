"""Study of base dtypes: it measures real training, resumes after a stop, and reports every base."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from benchmarks.memory import nf4_base
from benchmarks.reporting.rows import Rows
from espalier.errors import EspalierError
from espalier.hf.nf4 import cache as quantised_cache

SAMPLE = 8
HELD_OUT = 3
CONDITIONS: dict[str, Any] = {
    "model": {"name": "tiny", "parameters": 1_500_000},
    "weight_mib": dict.fromkeys(nf4_base.BASES, 1.25),
    "trained": 64,
    "steps": 2,
    "batch_size": 2,
    "sequence_length": SAMPLE,
    "held_out_samples": HELD_OUT,
    "threads": 1,
    "device": "cpu",
}


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    """Tiny model whose rows NF4 can represent, and a text of twelve samples."""
    config = LlamaConfig(
        vocab_size=32, hidden_size=64, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=16,
        tie_word_embeddings=False,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(2)
        weights = AutoModelForCausalLM.from_config(config).state_dict()
    directory = tmp_path / "model"
    config.save_pretrained(directory)
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    words = Tokenizer(WordLevel({f"w{index}": index for index in range(32)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(directory)
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{number * number % 31}" for number in range(12 * SAMPLE)))
    return {
        "method": "fedpetuning", "model": str(directory), "threads": 1, "device": "cpu",
        "data.source": "files", "data.path": str(text), "data.sequence-length": SAMPLE,
        "evaluation.max-samples": HELD_OUT, "lora.rank": 2, "training.steps": 3,
        "training.batch-size": 2, "training.learning-rate": 0.01,
    }  # fmt: skip


def test_loss_before_is_that_of_the_model_itself(settings: dict[str, Any], tmp_path: Path) -> None:
    found = nf4_base.measure(settings, tmp_path / "cache", train=True)
    tokens = torch.tensor([number * number % 31 for number in range(12 * SAMPLE)]).view(12, SAMPLE)[
        -HELD_OUT:
    ]
    model = AutoModelForCausalLM.from_pretrained(settings["model"]).eval()
    expected = nn.functional.cross_entropy(
        model(input_ids=tokens).logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
    )
    assert found["loss_before"] == pytest.approx(expected.item(), abs=1e-5)
    assert found["loss_after"] != found["loss_before"]
    assert found["peak_mib"] > 0.99 * found["interpreter_mib"] > 0, (
        "the kernel reports pages in batches of a few"
    )
    assert found["gpu_mib"] == 0


def test_a_second_load_reads_the_cache(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    first = nf4_base.measure({**settings, "training.base": "nf4"}, cache, train=False)
    assert set(first) == {"load_seconds", "interpreter_mib"}
    monkeypatch.setattr(quantised_cache, "quantise", None)
    second = nf4_base.measure({**settings, "training.base": "nf4"}, cache, train=True)
    assert second["loss_before"] > 0


def test_all_windows_as_held_out_are_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    for wrong in (0, 12):
        with pytest.raises(
            EspalierError,
            match=rf"--held-out-samples {wrong}: --text .*text.txt has 12 samples of 8 tokens",
        ):
            nf4_base.measure({**settings, "evaluation.max-samples": wrong}, tmp_path, train=False)


def measured(task: dict[str, Any], cache: Path, train: bool) -> dict[str, float]:
    """Return fake figures of a process, which depend on seed, base and dtype."""
    seed = task["seed"]
    if not train:
        return {"load_seconds": 9.0, "interpreter_mib": 1.0}
    dtype = {"float32": 0.0, "bfloat16": 0.25}[task["dtype"]]
    peak = {"float32": 400.0, "bfloat16": 300.0, "nf4": 200.0}[task["training.base"]]
    return {
        "load_seconds": 2.0, "step_seconds": 0.5 + dtype, "interpreter_mib": 100.0,
        "peak_mib": peak + 10 * seed, "gpu_mib": 0.0, "loss_before": 3.0, "loss_after": 2.0 + dtype,
    }  # fmt: skip


def test_rows_and_their_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, str, str, bool]] = []

    def fresh(flat: dict[str, Any], cache: Path, train: bool) -> dict[str, float]:
        asked.append((flat["seed"], flat["training.base"], flat["dtype"], train))
        return measured(flat, cache, train)

    monkeypatch.setattr(nf4_base, "_in_a_fresh_process", fresh)
    path = tmp_path / "nf4-base-tiny"
    rows = Rows(path.with_suffix(".csv"), nf4_base.KEYS, nf4_base.FIGURES, CONDITIONS)
    nf4_base.work({}, [0], rows)
    quantised = [
        (0, "nf4", dtype, train) for dtype in ("float32", "bfloat16") for train in (False, True)
    ]
    assert asked == [(0, "float32", "float32", True), (0, "bfloat16", "bfloat16", True), *quantised]
    nf4_base.work({}, [0, 2], rows)
    assert [one[0] for one in asked] == [0] * 6 + [2] * 6, "what was measured is not measured again"
    nf4_base.report(rows, CONDITIONS, path)
    text = path.with_suffix(".md").read_text()
    assert (
        "over 2 seeds. Model `tiny`, 1.5 M parameters; 64 trained; 2 steps of 2 x 8 tokens; cpu,"
        " threads: 1" in text
    )
    assert (
        "| nf4, computes in bfloat16 | 1.2 | 210 ± 14 | 100 ± 0 | 9.00 ± 0.00 | 2.00 ± 0.00 | 0.750"
        " ± 0.000 |" in text
    )
    assert "| bfloat16 | 1.2 | 310 ± 14 | 100 ± 0 | 2.00 ± 0.00 |  | 0.750 ± 0.000 |" in text, (
        "loaded once"
    )
    assert "GPU" not in text
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_a_name_with_a_dot_is_a_file_name_whole(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = Path(settings["model"]).rename(tmp_path / "tiny-0.1b")
    monkeypatch.setattr(nf4_base, "_in_a_fresh_process", measured)
    out = tmp_path / "out"
    given = [
        "--model",
        str(directory),
        "--text",
        settings["data.path"],
        "--device",
        "cpu",
        "--threads",
        "1",
        "--seeds",
        "0",
    ]
    monkeypatch.setattr("sys.argv", ["nf4_base", *given, "--out", str(out)])
    assert nf4_base.main() == 0
    assert sorted(file.name for file in out.iterdir()) == [
        f"nf4-base-tiny-0-1b.{end}" for end in ("csv", "json", "md", "png", "svg")
    ]
    written = "".join(
        (out / f"nf4-base-tiny-0-1b.{end}").read_text() for end in ("csv", "json", "md")
    )
    assert "Model `tiny-0.1b`" in written
    assert str(tmp_path) not in written
