"""Direction of imports, strictly downward and never sideways, and size of folders.

docs/develop/architecture.md has both rules.
"""

import ast
import subprocess
import sys
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FAMILIES = ("pruning", "tuning")
METHODS = [
    f"strategies.{family}.{file.stem}"
    for family in FAMILIES
    for file in sorted((ROOT / "strategies" / family).iterdir())
    if not file.stem.startswith("__")
]
"""Each strategy has a level of its own, so that none imports another."""

LINES = [
    ["espalier.cli", "espalier_assets.train"],
    ["espalier.api"],
    ["espalier.launch"],
    ["server_app.entry_point"],
    ["server_app.app", "server_app.preflight", "client_app.node"],
    ["server_app.estimate", "client_app.app"],
    ["server_app.artifacts", "server_app.tracking", "client_app.methods"],
    ["server_app.report", "client_app.policy"],
    ["server_app", "client_app.protocol"],
    ["client_app"],
    ["strategies.baselines", *METHODS],
    ["strategies.cuts", "strategies.masks"],
    ["strategies.averaging"],
    ["strategies.fleet"],
    ["strategies.base"],
    ["espalier.results"],
    ["espalier.training", "espalier.evaluation"],
    ["espalier.data", "espalier.hf"],
    ["espalier.methods"],
    ["espalier.messages"],
    ["espalier.privacy"],
    ["espalier.models", "espalier.storage"],
    ["espalier.identity", "espalier.secure_sum"],
    ["espalier.flower"],
    ["espalier.settings"],
    ["espalier.environment", "espalier.progress", "pruning_kernels"],
    ["espalier.run_lines"],
    ["espalier.errors", "espalier.seeds", "espalier.amounts", "espalier_assets"],
]  # fmt: skip
LEVEL = {room: level for level, rooms in enumerate(LINES) for room in rooms}
WITHOUT_TORCH = {
    room for room in LEVEL if LEVEL[room] > LEVEL["espalier.models"] and room != "pruning_kernels"
}
AT_A_SITE = {room for room in LEVEL if room.split(".")[0] not in ("server_app", "strategies")} - {
    "espalier.cli",
    "espalier.launch",
}
EXCEPTIONS = {
    "espalier.cli": WITHOUT_TORCH | {"espalier.launch"},
    "espalier.launch": WITHOUT_TORCH,
    "espalier.api": WITHOUT_TORCH | {"espalier.launch", "espalier.results"},
    "espalier_assets.train": {"espalier.data"},
    **{room: AT_A_SITE for room in LEVEL if room.split(".")[0] == "client_app"},
}
FORBIDDEN_LIBRARIES = {
    "pruning_kernels": {"flwr", "transformers", "safetensors", "pydantic"},
    "espalier.cli": {"torch", "transformers"},
    "espalier.launch": {"torch", "transformers"},
    "espalier.api": {"torch", "flwr", "transformers"},
    "espalier.data": {"transformers", "flwr"},
    "espalier.methods": {"transformers"},
    "espalier.models": {"flwr", "transformers"},
    "espalier.privacy": {"torch", "flwr", "transformers"},
    "espalier.settings": {"torch", "flwr", "transformers"},
    "espalier.progress": {"torch", "flwr", "transformers"},
}
FLOWER_S_INTERFACE = ("flwr.app.", "flwr.clientapp.", "flwr.serverapp.")
"""Prefixes of Flower modules that every room may import.

The rest is private to Flower and used only in ``espalier.flower``.
"""
JUNK_DRAWERS = {"utils", "helpers", "common", "misc"}
MOST_FILES = 15
WITHOUT_LIMIT = {ROOT / "docs" / "studies"}
"""Folders that may have more files: tables and figures that the studies write."""


def room_of(module: str) -> str | None:
    """Return the room of a dotted module name.

    Libraries, and packages that only contain rooms, have none.
    """
    rooms = [room for room in LEVEL if module == room or module.startswith(f"{room}.")]
    return max(rooms, key=len, default=None)


def imports_of(file: Path) -> list[str]:
    """Return the dotted names that a file imports.

    ``from package import name`` gives ``package.name`` if that is a module.
    """
    return imported(ast.parse(file.read_text()), str(file))


def imported(tree: ast.Module, place: str = "") -> list[str]:
    """Return the dotted names that a module imports, also inside functions."""
    modules = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{place}: relative import"
            package = node.module or ""
            modules += dict.fromkeys(
                f"{package}.{alias.name}" if is_module(f"{package}.{alias.name}") else package
                for alias in node.names
            )
    return modules


def is_module(name: str) -> bool:
    """Return whether this repository has a module or a package of a dotted name."""
    place = ROOT.joinpath(*name.split("."))
    return place.is_dir() or place.with_suffix(".py").is_file()


def wrong_imports(room: str, file: Path) -> list[str]:
    """Return the imports of a room's file that do not lie below the room."""
    return [module for module in imports_of(file) if not goes_downward(room, room_of(module))]


def files() -> list[tuple[str, Path]]:
    found = []
    for package in sorted({room.split(".")[0] for room in LEVEL}):
        for file in sorted((ROOT / package).rglob("*.py")):
            module = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(
                ".__init__"
            )
            found += [(room, file)] if (room := room_of(module)) is not None else []
    return found


def goes_downward(room: str, target: str | None) -> bool:
    if target is None or target == room:
        return True
    return LEVEL[target] > LEVEL[room] and target in EXCEPTIONS.get(room, {target})


def test_imports_go_downward() -> None:
    assert [(file, wrong) for room, file in files() if (wrong := wrong_imports(room, file))] == []


@pytest.mark.parametrize(
    ("room", "line", "wrong"),
    [
        ("strategies.base", "from strategies import fleet", ["strategies.fleet"]),
        ("strategies.base", "import strategies.pruning.flap as flap", ["strategies.pruning.flap"]),
        (
            "strategies.base",
            "from strategies.pruning.flap import Flap",
            ["strategies.pruning.flap"],
        ),
        ("strategies.fleet", "from strategies.pruning import flap", ["strategies.pruning.flap"]),
        ("strategies.fleet", "from strategies import base", []),
        ("espalier.settings", "from espalier import launch", ["espalier.launch"]),
        (
            "espalier.settings",
            "def late():\n    from espalier import launch as there",
            ["espalier.launch"],
        ),
        # This import goes sideways.
        ("espalier.hf", "from espalier import messages, data", ["espalier.data"]),
        # This room has a rule of its own.
        ("espalier.launch", "from espalier import hf", ["espalier.hf"]),
        ("espalier.hf", "from espalier import messages, __version__", []),
        ("espalier.hf", "from torch import nn", []),
    ],
)
def test_an_import_is_seen_however_it_is_written(
    tmp_path: Path, room: str, line: str, wrong: list[str]
) -> None:
    file = tmp_path / "module.py"
    file.write_text(f"{line}\n")
    assert wrong_imports(room, file) == wrong


def test_every_room_is_a_module() -> None:
    """A room is then found within the package that contains it."""
    assert [room for room in LEVEL if not is_module(room)] == []


def test_rooms_keep_to_their_libraries() -> None:
    found = [
        (file, module)
        for room, file in files()
        for module in imports_of(file)
        if module.split(".")[0] in FORBIDDEN_LIBRARIES.get(room, set())
    ]
    assert found == []


def test_private_flower_is_imported_in_one_room() -> None:
    found = [
        (file, module)
        for room, file in files()
        for module in imports_of(file)
        if module.split(".")[0] == "flwr"
        and room != "espalier.flower"
        and not f"{module}.".startswith(FLOWER_S_INTERFACE)
    ]
    assert found == []


def test_tests_import_private_flower_in_one_place() -> None:
    found = [
        (file, module)
        for folder in ("tests", "benchmarks", "docker")
        for file in (ROOT / folder).rglob("*.py")
        for module in imports_of(file)
        if module.split(".")[0] == "flwr"
        and file.parent != ROOT / "tests" / "flower"
        and not f"{module}.".startswith(FLOWER_S_INTERFACE)
    ]
    assert found == []


def test_every_python_file_lies_in_a_room() -> None:
    rooms = {file for _, file in files()}
    packages = (
        "espalier",
        "espalier_assets",
        "server_app",
        "client_app",
        "strategies",
        "pruning_kernels",
    )
    entrances = {ROOT / "espalier" / "__init__.py", ROOT / "espalier" / "__main__.py"}
    strategies = ROOT / "strategies"
    entrances |= {
        folder / "__init__.py" for folder in (strategies, *map(strategies.joinpath, FAMILIES))
    }
    found = {file for name in packages for file in (ROOT / name).rglob("*.py")}
    assert found - rooms == entrances


def test_no_folder_has_too_many_files() -> None:
    names = {room.split(".")[0] for room in LEVEL} | {"tests", "benchmarks", "docker"}
    files = [
        file
        for name in (*names, "conf", "docs")
        for file in (ROOT / name).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    ]
    sizes = Counter(file.parent for file in files)
    assert len(sizes) > 100
    assert {folder for folder, size in sizes.items() if size > MOST_FILES} <= WITHOUT_LIMIT


def test_there_is_no_junk_drawer() -> None:
    assert not [
        file
        for _, file in files()
        if JUNK_DRAWERS & set(file.with_suffix("").relative_to(ROOT).parts)
    ]


def without_types(tree: ast.Module) -> ast.Module:
    """Return a module without the imports that only type checkers see."""
    tree.body = [
        node
        for node in tree.body
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    ]
    return tree


def test_modules_have_no_cycles() -> None:
    """Imports inside functions count too: they often hide a cycle."""
    graph = {
        ".".join(file.relative_to(ROOT).with_suffix("").parts): imported(
            without_types(ast.parse(file.read_text()))
        )
        for _, file in files()
        if file.stem != "__init__"
    }
    # Raises ``CycleError`` with the modules of a cycle.
    TopologicalSorter(graph).prepare()


def test_methods_models_and_settings_load_neither_torch_nor_flower() -> None:
    """``espalier plan`` of settings, completion and the pages read them without these libraries."""
    program = """
import importlib, pkgutil, sys
import espalier.methods, espalier.models, espalier.settings

for package in (espalier.methods, espalier.models, espalier.settings):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)
sys.exit(", ".join({"torch", "flwr", "transformers"} & sys.modules.keys()) or 0)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
