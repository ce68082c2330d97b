"""Hash of the program that a node runs."""

import hashlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from espalier.identity import code_hash


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Package of two files that replaces the real packages."""
    root = tmp_path / "tiny_program_of_the_test"
    (root / "sub").mkdir(parents=True)
    (root / "__init__.py").write_text("")
    (root / "sub" / "b.py").write_text("B = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(code_hash, "PACKAGES", (root.name,))
    code_hash.code_sha256.cache_clear()
    yield root
    code_hash.code_sha256.cache_clear()
    sys.modules.pop(root.name, None)


def fresh() -> str:
    code_hash.code_sha256.cache_clear()
    return code_hash.code_sha256()


def test_is_the_hash_of_names_and_bytes(program: Path) -> None:
    expected = b""
    for name, content in (("__init__.py", b""), ("sub/b.py", b"B = 1\n")):
        full = f"{program.name}/{name}".encode()
        expected += len(full).to_bytes(8, "big") + full + hashlib.sha256(content).digest()
    assert fresh() == hashlib.sha256(expected).hexdigest()


def test_changes_with_bytes_name_and_existence(program: Path) -> None:
    seen = [fresh()]
    (program / "sub" / "b.py").write_text("B = 2\n")
    seen.append(fresh())
    (program / "sub" / "b.py").rename(program / "sub" / "c.py")
    seen.append(fresh())
    (program / "d.py").write_text("")
    seen.append(fresh())
    assert len(set(seen)) == 4


def test_does_not_change_with_what_is_no_program(program: Path) -> None:
    before = fresh()
    (program / "notes.txt").write_text("x")
    (program / "__pycache__").mkdir()
    (program / "__pycache__" / "b.cpython-311.pyc").write_bytes(b"x")
    assert fresh() == before


def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_hash, "PACKAGES", ("no_such_package_anywhere",))
    with pytest.raises(ModuleNotFoundError, match="no_such_package_anywhere"):
        fresh()


def test_real_program_s_hash_has_enrolment_form() -> None:
    assert re.fullmatch("[0-9a-f]{64}", fresh())


def test_covers_what_runs_on_a_node() -> None:
    assert set(code_hash.PACKAGES) == {"client_app", "espalier", "pruning_kernels"}
