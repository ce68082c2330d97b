"""Commands of the README and of the pages in docs/ are valid for their programs."""

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from espalier.cli.command import _parser
from espalier.cli.recovery import words_of_runs
from espalier.flower.programs import read_node_config
from espalier.launch.configuration import configuration
from espalier.launch.sweep_grid import cells_of
from espalier.settings.keys import changed
from espalier.settings.node import NodeSettings
from espalier.settings.run import parse
from tests.flower.flower_parts import (
    flwr_command,
    parse_config_args,
    parse_superlink_connection,
    supernode_parser,
)

ROOT = Path(__file__).parents[2]
PAGES = [
    file.relative_to(ROOT).as_posix()
    for file in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
]
PROGRAMS = ("flower-superlink", "flower-supernode", "flwr", "espalier")


def blocks(page: str, language: str = "") -> list[str]:
    """Return the contents of a page's fenced blocks of a language."""
    found = re.findall(
        r"^```([a-z]*)\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL
    )
    return [content for name, content in found if name == language]


def commands(page: str) -> list[list[str]]:
    """Return a page's commands that start one of the programs, as lists of words."""
    lines = [line for block in blocks(page) for line in block.replace("\\\n", " ").splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.split(" ")[0] in PROGRAMS]


COMMANDS = [command for page in PAGES for command in commands(page)]
OF_FLOWER = [command for command in COMMANDS if command[0] != "espalier"]
OF_ESPALIER = [command for command in COMMANDS if command[0] == "espalier"]


@cache
def flags_of(*program: str) -> set[str]:
    """Return the options in a program's help text."""
    if program[0] == "flwr":
        told = CliRunner(env={"COLUMNS": "200"}).invoke(flwr_command, [*program[1:], "--help"])
        assert told.exit_code == 0, told.output
        return set(re.findall(r"--[a-z][a-z-]*", told.output))
    beside = Path(sys.executable).parent / program[0]
    found = str(beside) if beside.exists() else shutil.which(program[0])
    assert found is not None
    done = subprocess.run(
        [found, *program[1:], "--help"],
        capture_output=True,
        text=True,
        env={"COLUMNS": "200", "PATH": ""},
    )
    assert done.returncode == 0, done.stderr
    return set(re.findall(r"--[a-z][a-z-]*", done.stdout))


def values(command: list[str], flag: str) -> list[str]:
    return [value for word, value in pairwise(command) if word == flag]


def test_there_are_commands_of_each_program() -> None:
    assert {command[0] for command in commands("docs/how-to/deployment.md")} == set(PROGRAMS)


@pytest.mark.parametrize("command", OF_FLOWER, ids=" ".join)
def test_flower_has_the_options(command: list[str]) -> None:
    program = (
        command[:1]
        if command[0] != "flwr"
        else [
            word for word in command[:3] if word in ("flwr", "run", "supernode", "register", "list")
        ]
    )
    given = {word for word in command if word.startswith("--")}
    assert given <= flags_of(*program)


@pytest.mark.parametrize(
    "command", [command for command in OF_FLOWER if command[0] == "flower-superlink"], ids=" ".join
)
def test_superlink_keeps_state_and_closed_ports(command: list[str]) -> None:
    assert values(command, "--database")
    assert values(command, "--host") == ["127.0.0.1"]
    assert "--disable-runtime-dependency-installation" in command
    if "--insecure" in command:
        assert values(command, "--fleet-api-address")[0].startswith("127.0.0.1:")
    else:
        assert "--enable-supernode-auth" in command


@pytest.mark.parametrize(
    "command", [command for command in OF_FLOWER if command[0] == "flower-supernode"], ids=" ".join
)
def test_supernode_has_a_site_and_no_open_port(command: list[str]) -> None:
    (given,) = values(command, "--node-config")
    assert NodeSettings.model_validate(read_node_config(given)).site
    # Flower's default is this machine.
    assert not values(command, "--host")
    assert ("--insecure" in command) != ("--root-certificates" in command)


@pytest.mark.parametrize("command", OF_ESPALIER, ids=" ".join)
def test_espalier_takes_the_words(command: list[str]) -> None:
    given, further = _parser().parse_known_args(command[1:])
    # Options that ``espalier node`` does not know are for flower-supernode.
    if given.command == "node":
        assert supernode_parser().parse_args(further).superlink == "server.example.org:9092"
        return
    assert not further
    if given.command == "keys":
        assert given.site
        return
    if not given.takes_settings:
        return
    runs = [given.words]
    if given.command == "sweep":
        runs = [list(cell.words) for cell in cells_of(given.words)]
    elif given.command == "run" and given.recover:
        runs = list(words_of_runs(ROOT, given.words))
    for words in runs:
        configuration(ROOT, words, on_this_machine=False)
    if given.command == "check-node":
        assert NodeSettings.model_validate(read_node_config(given.node_config)).site


def test_run_configurations_are_valid() -> None:
    given = [config for command in OF_FLOWER for config in values(command, "--run-config")]
    assert len(given) == 2
    for config in given:
        flat = parse_config_args([str(ROOT / config) if config.endswith(".toml") else config])
        assert parse(flat, by_hand=changed(flat)).num_clients == 2


def test_the_stanza_is_one_that_flower_reads() -> None:
    (stanza,) = blocks("docs/how-to/deployment.md", "toml")
    ((name, connection),) = tomllib.loads(stanza)["superlink"].items()
    read = parse_superlink_connection(connection, name)
    assert (read.address, read.insecure) == ("127.0.0.1:9093", False)
    assert any(command[:4] == ["flwr", "run", ".", name] for command in OF_FLOWER)
    assert any(
        command[:3] == ["flwr", "supernode", "register"] and command[-1] == name
        for command in OF_FLOWER
    )


def test_page_shows_the_proxy_s_configuration() -> None:
    (shown,) = blocks("docs/how-to/deployment.md", "nginx")
    assert (ROOT / "docker" / "reverse-proxy.conf").read_text().endswith(f"\n{shown}")
