"""A tokenizer that cannot be loaded: the error names the file and the reason."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from espalier.errors import EspalierError
from espalier.hf.opening.opened_model import OpenedModel, opened_in
from espalier.hf.tokenizer.files import stored_template
from tests.tiny_model import save_tiny_llama

FILE = "tokenizer.json"
SETTINGS = "tokenizer_config.json"


def written(name: str, content: str | bytes) -> Callable[[Path], None]:
    data = content.encode() if isinstance(content, str) else content

    def write(folder: Path) -> None:
        (folder / name).write_bytes(data)

    return write


def changed(**values: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        document = json.loads((folder / SETTINGS).read_text()) | values
        (folder / SETTINGS).write_text(json.dumps(document))

    return change


def removed(*names: str) -> Callable[[Path], None]:
    def remove(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return remove


def cut_off(folder: Path) -> None:
    text = (folder / FILE).read_text()
    (folder / FILE).write_text(text[: len(text) // 2])


def replaced(old: str, new: str) -> Callable[[Path], None]:
    def replace(folder: Path) -> None:
        text = (folder / FILE).read_text()
        assert old in text
        (folder / FILE).write_text(text.replace(old, new))

    return replace


def as_pair(folder: Path) -> None:
    """Store the tokenizer as GPT-2's files, without the merges file."""
    vocabulary = json.loads((folder / FILE).read_text())["model"]["vocab"]
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / FILE).unlink()
    changed(tokenizer_class="GPT2Tokenizer")(folder)


def dangling(folder: Path) -> None:
    (folder / FILE).unlink()
    (folder / FILE).symlink_to("blobs/none")


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
NOTHING = "no file with a vocabulary exists (tokenizer.json, "
OWN_CODE = {
    "tokenizer_class": "OwnTokenizer",
    "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]},
}


@pytest.mark.parametrize(
    ("damages", "told"),
    [
        (
            [changed(**OWN_CODE)],
            "names the tokenizer's own code (own.OwnTokenizer), which is not executed",
        ),
        (
            [changed(tokenizer_class="Own", auto_map=["own.Own", None])],
            "the tokenizer's own code (own.Own)",
        ),
        ([removed(FILE)], NOTHING),
        ([removed(FILE, SETTINGS)], NOTHING),
        ([removed(FILE), changed(tokenizer_class="LlamaTokenizer")], NOTHING),
        ([removed(FILE), changed(tokenizer_class="GPT2Tokenizer")], NOTHING),
        ([removed(FILE), changed(tokenizer_class="BertTokenizer")], NOTHING),
        ([as_pair], "merges.txt is missing; copy it"),
        ([as_pair, written("merges.txt", POINTER)], "merges.txt is a Git LFS pointer"),
        ([cut_off], "tokenizer.json: is not a JSON file: "),
        ([written(FILE, "")], "tokenizer.json is empty"),
        ([written(FILE, POINTER)], "tokenizer.json is a Git LFS pointer"),
        (
            [written(FILE, "<!DOCTYPE html>")],
            "tokenizer.json: is not a JSON file: Expecting value: line 1",
        ),
        ([written(FILE, b"\x00\xff")], "tokenizer.json: is not a JSON file: 'utf-8' codec"),
        ([written(FILE, "[]")], "tokenizer.json: contains a JSON list instead of"),
        ([written(FILE, "{}")], "or install the version of the library tokenizers"),
        (
            [written(FILE, "[" * 100_000)],
            "its lists and objects are nested more than 64 levels deep",
        ),
        ([replaced('"BPE"', '"XPE"')], "or install the version of the library tokenizers"),
        ([dangling], "tokenizer.json is a link to a missing file"),
        ([written(SETTINGS, '{"tokenizer_class":')], "tokenizer_config.json: is not a JSON file: "),
        ([written(SETTINGS, "[]")], "tokenizer_config.json: contains a JSON list"),
        (
            [changed(tokenizer_class=5)],
            "tokenizer.json and tokenizer_config.json cannot be read together",
        ),
        (
            [written("special_tokens_map.json", "{")],
            "special_tokens_map.json: is not a JSON file: ",
        ),
        ([written("added_tokens.json", '["a"]')], "added_tokens.json: contains a JSON list"),
    ],
)
def test_the_reason_names_the_file(
    damages: list[Callable[[Path], None]],
    told: str,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    base = tmp_path_factory.getbasetemp() / "model-with-tokenizer"
    if not base.exists():
        save_tiny_llama(base)
    folder = Path(shutil.copytree(base, tmp_path / "model"))
    for damage in damages:
        damage(folder)
    with pytest.raises(EspalierError) as refused:
        print(len(opened_in(folder).tokenizer))
    assert str(refused.value).startswith(f"{folder}: the tokenizer cannot be loaded: ")
    assert told in str(refused.value)
    assert "put it beside" not in str(refused.value)


def test_a_tokenizer_that_needs_no_file_is_loaded(tmp_path: Path) -> None:
    folder = save_tiny_llama(tmp_path)
    (folder / FILE).unlink()
    changed(tokenizer_class="ByT5Tokenizer")(folder)
    assert OpenedModel(folder).encode("a") == [100, 1]


class Panic(BaseException):
    """Exception like pyo3's panic, which is not an ``Exception``."""


@pytest.mark.parametrize(
    ("raised", "expected"), [(Panic, EspalierError), (KeyboardInterrupt, KeyboardInterrupt)]
)
def test_library_panic_is_an_error(
    raised: type[BaseException],
    expected: type[BaseException],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*given: object, **named: object) -> None:
        raise raised("index out of bounds")

    folder = save_tiny_llama(tmp_path)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", fail)
    with pytest.raises(expected, match="index out of bounds"):
        print(OpenedModel(folder).tokenizer)


def test_template_is_the_one_that_transformers_uses(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path)
    bare = OpenedModel(tmp_path).sha256
    hashes = [bare]
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "one"}]
    for write, template in (
        (changed(chat_template=named), "one"),
        (changed(chat_template="two"), "two"),
        (written("chat_template.jinja", "three"), "three"),
        (removed("chat_template.jinja"), "two"),
    ):
        write(tmp_path)
        model = OpenedModel(tmp_path)
        found = model.tokenizer.chat_template
        assert (found["default"] if isinstance(found, dict) else found) == template
        assert stored_template(tmp_path) == template
        hashes.append(model.sha256)
    assert len(set(hashes)) == 4
    assert hashes[2] == hashes[4]
