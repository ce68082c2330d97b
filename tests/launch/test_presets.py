"""Presets: one name each, wherever in ``conf`` they are."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from espalier.cli.command import main
from espalier.errors import InputError
from espalier.launch.presets import preset_files, read_preset
from espalier.settings.registry import METHODS

APP = Path(__file__).parents[2]


@pytest.fixture
def app(tmp_path: Path) -> Path:
    """Return a copy of the project's settings and presets."""
    shutil.copy(APP / "pyproject.toml", tmp_path)
    shutil.copytree(APP / "conf", tmp_path / "conf")
    return tmp_path


def test_every_file_is_a_preset_or_a_fleet() -> None:
    files = set((APP / "conf").rglob("*.toml"))
    fleets = set((APP / "conf" / "devices").iterdir())
    assert set(preset_files(APP).values()) == files - fleets
    assert all(file.stem == name for name, file in preset_files(APP).items())


def test_a_method_has_a_preset_of_its_name_at_the_top() -> None:
    at_the_top = {file.stem for file in (APP / "conf").iterdir() if file.is_file()}
    assert at_the_top == set(METHODS)


def test_a_name_is_enough_in_any_folder(app: Path) -> None:
    (app / "conf" / "own" / "deep").mkdir(parents=True)
    (app / "conf" / "own" / "deep" / "mine.toml").write_text("seed = 3\n")
    assert read_preset(app, "mine") == {"seed": 3}
    assert read_preset(app, "fedot") == read_preset(app, str(app / "conf/papers/fedot.toml"))
    with pytest.raises(InputError, match="preset 'medium': there is none of this name"):
        read_preset(app, "medium")


@pytest.mark.parametrize("read", [preset_files, lambda app: read_preset(app, "fedsoda")])
def test_two_presets_of_one_name_are_refused(
    app: Path, read: Callable[[Path], object], capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(app / "conf" / "flap.toml", app / "conf" / "examples")
    with pytest.raises(InputError, match=r"flap\.toml and .*flap\.toml have the same name"):
        read(app)
    assert main(["run", "flap", "--app", str(app)]) == 2
    assert "preset 'flap': " in capsys.readouterr().err
