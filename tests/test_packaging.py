"""Contents of a wheel: the command, the demo model and the whole Flower app.

A wheel has two top-level names.
"""

import hashlib
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from espalier.launch.presets import preset_files
from tests.flower.flower_parts import build_fab_from_disk

builders = pytest.importorskip(
    "hatchling.builders.wheel", reason="hatchling, which builds wheels, is not installed"
)

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PRESETS = list(preset_files(ROOT))


def built(kind: str, folder: Path) -> zipfile.ZipFile:
    """Build a wheel of this checkout in this process."""
    (wheel,) = builders.WheelBuilder(str(ROOT)).build(directory=str(folder), versions=[kind])
    return zipfile.ZipFile(wheel)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return built("standard", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: zipfile.ZipFile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unpack the wheel into a folder, as pip does into site-packages."""
    folder = tmp_path_factory.mktemp("site-packages")
    wheel.extractall(folder)
    return folder


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    folder = tmp_path / "empty"
    folder.mkdir()
    return folder


def python(installed: Path, cwd: Path, *arguments: str) -> str:
    """Return the output of a Python with the wheel and the libraries, but not this checkout.

    The option ``-S`` disables ``.pth`` files.
    """
    libraries = [path for path in sys.path if path.endswith("site-packages")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(installed), *libraries])}
    done = subprocess.run(
        [sys.executable, "-S", *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def app_of(installed: Path) -> Path:
    return installed / "espalier_assets" / "app"


# ----- contents -----------------------------------------------------------------------------------


def test_wheel_has_only_its_own_top_level_names(wheel: zipfile.ZipFile) -> None:
    at_the_top = {name.split("/")[0] for name in wheel.namelist()}
    assert at_the_top == {
        "espalier",
        "espalier_assets",
        f"espalier-{PYPROJECT['project']['version']}.dist-info",
    }


def test_wheel_holds_all_package_and_app_files(wheel: zipfile.ZipFile) -> None:
    def files(*patterns: str) -> Iterator[str]:
        for pattern in patterns:
            yield from (file.relative_to(ROOT).as_posix() for file in ROOT.glob(pattern))

    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    packages = {
        *files(
            "espalier/**/*.py",
            "espalier/py.typed",
            "espalier_assets/*.py",
            "espalier_assets/*.json",
            "espalier_assets/demo/*",
        )
    }
    app = {
        *files(*PYPROJECT["tool"]["flwr"]["app"]["fab-include"], "conf/**/*.toml"),
        *files("espalier/py.typed", "pyproject.toml"),
    }
    assert names == packages | {f"espalier_assets/app/{name}" for name in app}


def test_both_copies_of_the_package_are_the_same(wheel: zipfile.ZipFile) -> None:
    for name in wheel.namelist():
        if name.startswith("espalier/"):
            assert wheel.read(name) == wheel.read(f"espalier_assets/app/{name}")


def test_editable_install_is_the_checkout_alone(tmp_path: Path) -> None:
    with built("editable", tmp_path) as wheel:
        (paths,) = [
            wheel.read(name).decode() for name in wheel.namelist() if ".dist-info/" not in name
        ]
    assert paths.split() == [str(ROOT)]


# ----- behavior -----------------------------------------------------------------------------------


def test_wheel_and_checkout_give_the_same_bundle(installed: Path) -> None:
    bundles = [
        hashlib.sha256(build_fab_from_disk(folder)).hexdigest()
        for folder in (ROOT, app_of(installed))
    ]
    assert bundles[0] == bundles[1]


def test_command_finds_app_and_presets_anywhere(installed: Path, empty: Path) -> None:
    assert python(installed, empty, "-m", "espalier.cli.command", "app") == str(app_of(installed))
    assert list(preset_files(app_of(installed))) == PRESETS
    program = """
from espalier.launch.app import find_app
from espalier.launch.configuration import configuration
config, settings = configuration(find_app(None), ["fedspallm", "num-clients=3"], \
on_this_machine=True)
print(settings.method, settings.num_clients, config["out-dir"])
"""
    assert python(installed, empty, "-c", program) == f"fedspallm 3 {empty}/runs"
    assert list(empty.iterdir()) == []


def test_importing_espalier_gives_other_rooms(installed: Path, empty: Path) -> None:
    """``espalier`` needs ``pruning_kernels``; authors of strategies need ``strategies``."""
    program = """
import espalier, espalier.messages.blobs.masks, espalier.launch, espalier_assets
import strategies.pruning.fedspallm.strategy, pruning_kernels.votes.bitmask
for module in (espalier, pruning_kernels, strategies, espalier_assets): print(module.__path__[0])
print(espalier_assets.DEMO_MODEL.is_dir())
"""
    app = app_of(installed)
    expected = [
        installed / "espalier",
        app / "pruning_kernels",
        app / "strategies",
        installed / "espalier_assets",
        True,
    ]
    assert python(installed, empty, "-c", program).splitlines() == list(map(str, expected))


def test_package_of_the_same_name_is_not_hidden(installed: Path, empty: Path) -> None:
    (empty / "strategies").mkdir()
    (empty / "strategies" / "__init__.py").touch()
    program = "import espalier, strategies; print(strategies.__path__[0])"
    assert python(installed, empty, "-c", program) == str(empty / "strategies")


def test_code_hash_equals_that_of_the_checkout(installed: Path, empty: Path) -> None:
    program = "from espalier.identity.code_hash import code_sha256; print(code_sha256())"
    assert python(installed, empty, "-c", program) == python(ROOT, empty, "-c", program)


# ----- constraints --------------------------------------------------------------------------------


CONSTRAINTS = ("constraints.txt", "constraints-flower-1.42.txt")


def pinned(name: str = CONSTRAINTS[0]) -> dict[str, str]:
    lines = (ROOT / name).read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    assert [name for name, _ in pairs] == sorted((name for name, _ in pairs), key=str.lower)
    return {name.lower().replace("_", "-"): number for name, number in pairs}


UNPINNED = ("partitioners", "wandb", "mlflow")
"""Extras that ``dev`` does not have; partitioners needs an older release of datasets."""
TRACKING_TOOLS = ("tensorboard", "trackio", "wandb", "mlflow")
"""Extras that only record figures, which do not depend on their versions."""


def requirements() -> list[Requirement]:
    project = PYPROJECT["project"]
    extras = [
        line
        for name, lines in project["optional-dependencies"].items()
        if name not in UNPINNED
        for line in lines
    ]
    found = [Requirement(line) for line in [*project["dependencies"], *extras]]
    return [requirement for requirement in found if requirement.name != "espalier"]


@pytest.mark.parametrize("name", CONSTRAINTS)
@pytest.mark.parametrize("requirement", requirements(), ids=lambda requirement: requirement.name)
def test_every_requirement_is_pinned_in_range(requirement: Requirement, name: str) -> None:
    assert requirement.specifier.contains(pinned(name)[requirement.name.lower()])


def test_constraints_name_no_local_build() -> None:
    """A pin such as ``torch==2.13.0`` allows CPU builds as well as CUDA builds."""
    assert not [number for number in pinned().values() if "+" in number]


def test_lock_has_constrained_versions_and_hashes() -> None:
    entries = (ROOT / "requirements.lock").read_text().replace("\\\n", " ").splitlines()
    locked = [
        re.fullmatch(r"(\S+)==(\S+)( +--hash=sha256:[0-9a-f]{64})+ *", line)
        for line in entries
        if not line.startswith("#")
    ]
    found = {entry[1]: entry[2] for entry in locked if entry}
    assert len(found) == len(locked)
    of_torch = {
        "torch",
        "sympy",
        "mpmath",
        "networkx",
        "jinja2",
        "markupsafe",
        "filelock",
        "fsspec",
        "typing-extensions",
    }
    versions = {name.replace(".", "-"): number for name, number in pinned().items()}
    assert found == {
        name: number for name, number in versions.items() if name in found or name not in of_torch
    }


@pytest.mark.parametrize("extra", ["nf4", "hub", "gguf"])
def test_dev_brings_what_tests_of_extras_need(extra: str) -> None:
    brought = {
        name
        for line in PYPROJECT["project"]["optional-dependencies"]["dev"]
        for name in Requirement(line).extras
    }
    assert extra in brought


def test_command_has_project_s_version() -> None:
    assert version("espalier") == PYPROJECT["project"]["version"]
