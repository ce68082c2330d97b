"""The schema alone defines a setting: settings page, pyproject's defaults and presets follow it."""

import re
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from espalier.flower.programs import read_node_config
from espalier.launch.configuration import read_pair
from espalier.launch.presets import preset_files
from espalier.methods.tuning.hetlora import HetLoRASettings
from espalier.settings.keys import as_text, default_values
from espalier.settings.node import NodeSettings
from espalier.settings.registry import METHODS, settings_of
from tests.pages.schema import Key, keys_of, keys_of_a_run
from tests.pages.settings_page import BEGIN, END, settings_page, with_app_config
from tests.toy_method.contract import METHOD as TOY

ROOT = Path(__file__).parents[2]
PYPROJECT = (ROOT / "pyproject.toml").read_text()
PRESETS = list(preset_files(ROOT).values())
KEYS = {key.dotted: key for key in keys_of_a_run()}
NODE_KEYS = {key.dotted: key for key in keys_of(NodeSettings)}


def flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables under dotted keys."""
    values: dict[str, Any] = {}
    for key, value in table.items():
        values |= (
            flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
        )
    return values


PYPROJECT_KEYS = flat(tomllib.loads(PYPROJECT)["tool"]["flwr"]["app"]["config"])


# ----- what is generated --------------------------------------------------------------------------


def test_the_page_is_what_the_schema_gives() -> None:
    """If not: ``python -m tests.pages.settings_page``."""
    assert (ROOT / "docs" / "reference" / "settings.md").read_text() == settings_page()


def test_pyproject_defaults_equal_the_schema() -> None:
    """If not: ``python -m tests.pages.settings_page``."""
    assert with_app_config(PYPROJECT) == PYPROJECT


def test_defaults_stand_between_markers() -> None:
    block = PYPROJECT.split(BEGIN)[1].split(END)[0]
    assert flat(tomllib.loads(block)["tool"]["flwr"]["app"]["config"]) == PYPROJECT_KEYS


def test_only_the_block_is_replaced() -> None:
    assert with_app_config(f"a = 1\n{BEGIN}\nold = 2\n{END}\nb = 3\n").splitlines()[:2] == [
        "a = 1",
        BEGIN,
    ]
    replaced = tomllib.loads(with_app_config(f"a = 1\n{BEGIN}\nold = 2\n{END}\n[c]\nb = 3\n"))
    assert (replaced["a"], replaced["c"], "old" in replaced) == (1, {"b": 3}, False)
    for broken in ("", f"{BEGIN}\n", f"{END}\n", f"{BEGIN}\n{END}\n{BEGIN}\n{END}\n"):
        with pytest.raises(ValueError, match="needs one line"):
            with_app_config(broken)


# ----- every key ----------------------------------------------------------------------------------


def test_the_schemas_keys_are_those_of_a_run() -> None:
    assert {name: key.default for name, key in KEYS.items()} == default_values()


@pytest.mark.parametrize("name", KEYS)
def test_every_key_is_described_and_documented(name: str) -> None:
    """In a row of the page, and in pyproject with a comment above it."""
    key = KEYS[name]
    assert key.description.endswith(".")
    assert rows(settings_page())[name].endswith(f"| {key.description} |")
    assert PYPROJECT_KEYS[name] == key.default
    assert re.search(rf"^# [^\n]+\n{key.name} = ", PYPROJECT, re.MULTILINE)


@pytest.mark.parametrize("name", KEYS)
def test_every_key_takes_its_default_as_text(name: str) -> None:
    """As after ``espalier run``."""
    default = KEYS[name].default
    read = read_pair(f"{name}={as_text(default)}", PYPROJECT_KEYS)
    assert read == (name, default)
    assert type(read[1]) is type(default)


@pytest.mark.parametrize("name", NODE_KEYS)
def test_every_node_key_is_described(name: str) -> None:
    key = NODE_KEYS[name]
    assert key.description.endswith(".")
    assert rows(settings_page().split("\n## node-config\n")[1])[name].endswith(
        f"| {key.description} |"
    )
    text = f'"{key.default}"' if isinstance(key.default, str) else as_text(key.default)
    assert NodeSettings.model_validate(read_node_config(f"{name}={text}")) == NodeSettings()


def rows(page: str) -> dict[str, str]:
    """The rows of the page's tables, by key; of two keys of one name the first."""
    found: dict[str, str] = {}
    for line in page.splitlines():
        if match := re.match(r"\| `([a-z0-9.-]+)` \|", line):
            found.setdefault(match[1], line)
    return found


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("quorum", "0 to 1"),
        ("num-clients", "1 or more"),
        ("threads", "1 to 1,024"),
        ("pruning.sparsity", "over 0, below 1"),
        ("training.learning-rate", "over 0, at most 0.1"),
        ("fedprllm.ties", "magnitude, index, random"),
        ("lora.merge", "true, false"),
        ("model", ""),
    ],
)
def test_ranges_are_in_words(name: str, allowed: str) -> None:
    assert KEYS[name].allowed == allowed


def test_a_key_that_others_make_moot_says_so() -> None:
    assert KEYS["pruning.sparsity"].description.endswith(" Read only if `pattern` is empty.")
    assert KEYS["fedspallm.damping-mean"].description.endswith(
        " Read only if `local-method` is `sparsegpt`."
    )


def by_method(key: str) -> dict[str, str]:
    """What a description says that a key stands for: by method, the value."""
    said = re.findall(
        r"(?:is |; )`?([\w-]+)`? with ([^;.]+)",
        {one.dotted: one.description for one in keys_of_a_run()}[key],
    )
    return {method: value for value, methods in said for method in re.split(", | and ", methods)}


def test_methods_say_their_rounds_and_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the table as it stands, and of methods that come or change."""
    for key, values in (
        ("rounds", "ROUNDS"),
        ("client-weights", "WEIGHTS"),
        ("aggregation-rule", "RULES"),
    ):
        jobs = {
            method: settings_of(method)
            for method in METHODS
            if key in settings_of(method).FEDERATION
        }
        expected = {method: getattr(job, values) for method, job in jobs.items()}
        first = {
            method: str(value if isinstance(value, int) else value[0])
            for method, value in expected.items()
        }
        assert by_method(f"federation.{key}") == first
    monkeypatch.setitem(METHODS, "toy", TOY)
    monkeypatch.setattr(HetLoRASettings, "ROUNDS", 7)
    monkeypatch.setattr(HetLoRASettings, "WEIGHTS", ("importance", "equal"))
    rounds = by_method("federation.rounds")
    weights = by_method("federation.client-weights")
    assert (rounds["toy"], rounds["hetlora"], rounds["sft-p"], rounds["fedspallm"]) == (
        "2",
        "7",
        "10",
        "1",
    )
    assert "toy" not in weights
    assert (weights["hetlora"], weights["fedspine"], weights["slicegpt"]) == (
        "importance",
        "samples",
        "samples",
    )
    (told,) = (
        key.description for key in keys_of_a_run() if key.dotted == "federation.client-weights"
    )
    assert " Only fedspine and hetlora can have `importance`." in told
    assert "can have `norms`" not in told


# ----- presets ------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.stem)
def test_preset_holds_method_and_differences(preset: Path) -> None:
    """The method stands there even if it is the default one, since it is what the preset is of."""
    given = flat(tomllib.loads(preset.read_text()))
    assert "method" in given
    assert [
        key for key, value in given.items() if key != "method" and value == KEYS[key].default
    ] == []


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.stem)
def test_preset_has_its_command_and_reasons(preset: Path) -> None:
    text = preset.read_text()
    assert re.search(
        rf"^#     (espalier run {re.escape(preset.stem)}\b|flwr run .*{re.escape(preset.name)})",
        text,
        re.MULTILINE,
    )
    lines = text.splitlines()
    without = [
        line
        for above, line in pairwise(lines)
        if re.match(r"[a-z]", line) and " # " not in line and not above.startswith("# ")
    ]
    assert [line for line in without if not line.startswith("method = ")] == []


def test_a_key_says_where_it_stands() -> None:
    assert (Key("", "seed", 0, "", (), "").dotted, Key("data", "path", "", "", (), "").dotted) == (
        "seed",
        "data.path",
    )
