"""Imports go strictly downward between rooms, never sideways within a line (docs/architecture.md)."""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent

LINES = [
    ["espalier.launch", "espalier_assets.train"],
    ["server_app", "client_app"],
    ["strategies.methods", "strategies.baselines"],
    ["strategies.results"],
    ["strategies.engine"],
    ["espalier.training", "espalier.evaluation"],
    ["espalier.corpora", "espalier.modeling"],
    ["espalier.wire", "espalier.storage"],
    ["espalier.settings", "espalier.pace", "pruning_kernels"],
    ["espalier_assets"],
]
LEVEL = {room: level for level, rooms in enumerate(LINES) for room in rooms}
EXCEPTIONS = {
    "espalier.launch": {"espalier.settings"},
    "espalier_assets.train": {"espalier.corpora"},
    "client_app": {
        room for room in LEVEL if room.split(".")[0] != "strategies" and room not in ("espalier.launch", "server_app")
    },
}
FORBIDDEN_LIBRARIES = {
    "pruning_kernels": {"flwr", "transformers", "safetensors", "pydantic"},
    "espalier.launch": {"torch", "transformers"},
    "espalier.corpora": {"transformers", "flwr"},
    "espalier.settings": {"torch", "flwr", "transformers"},
    "espalier.pace": {"torch", "flwr", "transformers"},
}
JUNK_DRAWERS = {"utils", "helpers", "common", "misc"}


def room_of(module: str) -> str | None:
    """The room that a dotted module name belongs to; None for libraries and for packages that hold rooms."""
    rooms = [room for room in LEVEL if module == room or module.startswith(f"{room}.")]
    return max(rooms, key=len, default=None)


def imports_of(file: Path) -> list[str]:
    modules = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            modules.append(node.module or "")
    return modules


def files() -> list[tuple[str, Path]]:
    found = []
    for package in sorted({room.split(".")[0] for room in LEVEL}):
        for file in sorted((ROOT / package).rglob("*.py")):
            module = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            found += [(room, file)] if (room := room_of(module)) is not None else []
    return found


def goes_downward(room: str, target: str | None) -> bool:
    if target is None or target == room:
        return True
    return LEVEL[target] > LEVEL[room] and target in EXCEPTIONS.get(room, {target})


def test_imports_go_downward() -> None:
    found = [
        (file, module) for room, file in files() for module in imports_of(file) if not goes_downward(room, room_of(module))
    ]
    assert found == []


def test_rooms_keep_to_their_libraries() -> None:
    found = [
        (file, module)
        for room, file in files()
        for module in imports_of(file)
        if module.split(".")[0] in FORBIDDEN_LIBRARIES.get(room, set())
    ]
    assert found == []


def test_every_python_file_lies_in_a_room() -> None:
    rooms = {file for _, file in files()}
    packages = ("espalier", "espalier_assets", "server_app", "client_app", "strategies", "pruning_kernels")
    assert [file for name in packages for file in (ROOT / name).rglob("*.py") if file not in rooms] == [
        ROOT / name / "__init__.py" for name in ("espalier", "strategies")
    ]


def test_there_is_no_junk_drawer() -> None:
    assert not [file for _, file in files() if JUNK_DRAWERS & set(file.with_suffix("").relative_to(ROOT).parts)]
