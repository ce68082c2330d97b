"""Files of a model directory that are copied with the model, and the model's name."""

from pathlib import Path
from typing import Any

import pytest

from espalier.hf.opening.model_files import copy_other_files, public_name

BELONGS = [
    "config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer.json",
    "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "vocab.txt", "sentencepiece.bpe.model", "chat_template.jinja",
    "LICENSE", "LICENSE.txt", "LICENSE.md", "licence-model.pdf", "Notice", "USE_POLICY.md",
    "COPYING", "LICENSE-APACHE-2.0", "license_mit.txt",
]  # fmt: skip
DOES_NOT = [
    "wiki_heldout.txt", "train.json", "README.md", "model.safetensors", "pytorch_model.bin",
    "optimizer.pt", "model.gguf", "trainer_state.json", "notes.md", "patients.jsonl",
    "modeling_custom.py", ".hidden", "licensed.txt", "LICENSE.json", "config.json.bak",
    "noticeboard.txt", "notice_to_patients.txt", "license-server-password.txt", "Licence-keys.txt",
    "copying.notes.md",
]  # fmt: skip


def test_known_files_are_copied_and_no_others(tmp_path: Path) -> None:
    source = tmp_path / "source"
    target = tmp_path / "target"
    for folder in (source, target, source / "additional_chat_templates", source / "checkpoint-10"):
        folder.mkdir()
    for name in [*BELONGS, *DOES_NOT]:
        (source / name).write_text(f"this is {name}")
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("a template")
    (source / "additional_chat_templates" / "draft.txt").write_text("a note")
    (source / "checkpoint-10" / "config.json").write_text("another model")
    copy_other_files(source, target)
    found = {
        file.relative_to(target).as_posix(): file.read_text()
        for file in target.rglob("*")
        if file.is_file()
    }
    expected = {name: f"this is {name}" for name in BELONGS}
    assert found == expected | {"additional_chat_templates/tool_use.jinja": "a template"}


def test_what_is_left_out_is_not_copied(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    for name in ("config.json", "model.safetensors.index.json"):
        (tmp_path / name).touch()
    copy_other_files(tmp_path, tmp_path / "target", ("model.safetensors.index.json",))
    assert [file.name for file in (tmp_path / "target").iterdir()] == ["config.json"]


def test_links_of_hub_cache_become_files(tmp_path: Path) -> None:
    blob = tmp_path / "blobs" / "4f"
    snapshot = tmp_path / "snapshots" / "ab"
    target = tmp_path / "target"
    for folder in (blob.parent, snapshot, target):
        folder.mkdir(parents=True)
    blob.write_text("{}")
    (snapshot / "config.json").symlink_to(blob)
    copy_other_files(snapshot, target)
    assert (target / "config.json").read_text() == "{}"
    assert not (target / "config.json").is_symlink()


@pytest.mark.parametrize(
    ("directory", "config", "name"),
    [
        ("/data/models/Llama-2-7b-hf", {}, "Llama-2-7b-hf"),
        (
            "/data/models/Llama-2-7b-hf",
            {"_name_or_path": "meta-llama/Llama-2-7b-hf"},
            "meta-llama/Llama-2-7b-hf",
        ),
        (
            "/data/models/our-tuned-llama",
            {"_name_or_path": "meta-llama/Llama-2-7b-hf"},
            "our-tuned-llama",
        ),
        ("/data/models/opt", {"_name_or_path": "/home/somebody/models/opt"}, "opt"),
        ("/data/models/opt", {"_name_or_path": 7}, "opt"),
        ("/cache/hub/models--facebook--opt-125m/snapshots/27dcfa74", {}, "facebook/opt-125m"),
        (
            "/cache/hub/models--facebook--opt-125m/snapshots/27dcfa74",
            {"_name_or_path": "x/27dcfa74"},
            "facebook/opt-125m",
        ),
        ("/cache/hub/models--gpt2/snapshots/607a30d7", {}, "gpt2"),
    ],
)
def test_a_model_is_called_what_others_call_it(
    directory: str, config: dict[str, Any], name: str
) -> None:
    assert public_name(Path(directory), config) == name
