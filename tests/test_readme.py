"""What the README says is what the code says."""

import itertools
import re
import shlex
import tomllib
from pathlib import Path

from espalier.settings.node import NodeSettings
from espalier.wire.privacy_table import privacy_table

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_privacy_table_is_the_one_made_from_the_contracts() -> None:
    assert privacy_table() in (ROOT / "docs" / "privacy.md").read_text()


def test_settings_it_names_exist() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    known = {key for key, value in config.items() if not isinstance(value, dict)}
    known |= {f"{table}.{key}" for table, values in config.items() if isinstance(values, dict) for key in values}
    named = set(re.findall(r"`((?:fedprllm|fedspallm|data|evaluation)\.[a-z-]+)`", README)) | {
        "num-clients",
        "quorum",
        "threads",
    }
    assert named <= known


def test_node_settings_it_names_exist() -> None:
    known = {field.alias for field in NodeSettings.model_fields.values()}
    section = README.split("A site describes itself")[1].split("What failures cost")[0]
    assert set(re.findall(r"^\| `([a-z-]+)`", section, re.MULTILINE)) <= known


def test_the_superlink_it_starts_opens_its_control_api_to_nobody_and_keeps_a_database() -> None:
    """And the other commands reach it where it listens."""
    (line,) = [line for line in README.splitlines() if line.startswith("flower-superlink")]
    words = shlex.split(line)
    given = dict(itertools.pairwise(words))
    for name in ("control", "serverappio", "fleet"):
        assert given[f"--{name}-api-address"].startswith("127.0.0.1:")
    assert given["--database"].endswith(".db")
    nodes = [shlex.split(line) for line in README.splitlines() if line.startswith("flower-supernode")]
    assert {words[words.index("--superlink") + 1] for words in nodes} == {given["--fleet-api-address"]}
    assert f"espalier run two-sites --superlink {given['--control-api-address']}\n" in README
