"""Run directory, as the commands that look at results read it."""

import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from espalier.environment.bounded_json import read_json_object
from espalier.environment.paths import at_home
from espalier.errors import InputError

MODEL = "model"
ADAPTER = "adapter"
CLIENTS = "clients"
"""Name of a folder in the run directory with one subfolder for each client's own model."""
ADAPTER_CONFIG = "adapter_config.json"
SUMMARY_VERSION = 2
"""Form of ``summary.json``; a change that readers of the old form would misread raises it."""
SUMMARY_KEYS = {"method", "status", "metrics"}
"""Keys by which a ``summary.json`` is recognised; every run writes them from its beginning."""


@dataclass(frozen=True)
class FinishedRun:
    """Directory of a run that has written ``summary.json``; the run may be at work or have failed.

    Parameters
    ----------
    path : absolute path of the directory
    summary : contents of ``summary.json``
    """

    path: Path
    summary: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Name of the directory."""
        return self.path.name

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """Settings of the run, by table, as ``settings.toml`` has them."""
        path = self.path / "settings.toml"
        try:
            settings = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise InputError(
                f"{path}: cannot be read ({error.strerror}); restore it from a backup"
            ) from None
        except ValueError as error:
            raise InputError(f"{path}: is not TOML ({error}); restore it from a backup") from None
        if not settings:
            raise InputError(f"{path}: is empty; restore it from a backup")
        return settings

    def setting(self, key: str) -> Any:
        """Return a setting by its dotted key, such as ``lora.rank``; None if the run has none."""
        found: Any = self.settings
        for part in key.split("."):
            if not isinstance(found, Mapping):
                return None
            found = found.get(part)
        return found

    @property
    def model(self) -> Path | None:
        """Directory of the federated model in Hugging Face format; None if there is none."""
        return self._directory(MODEL, "config.json")

    @property
    def adapter(self) -> Path | None:
        """Directory of the federated adapter in PEFT's format; None if there is none."""
        return self._directory(ADAPTER, ADAPTER_CONFIG)

    @property
    def client_models(self) -> dict[str, Path]:
        """Directories of the clients' own models by name; empty unless each client has its own."""
        places = sorted(self.path.glob(f"{CLIENTS}/*/config.json"))
        return {place.parent.name: place.parent for place in places}

    def _directory(self, name: str, file: str) -> Path | None:
        place = self.path / name
        return place if (place / file).is_file() else None

    def json_lines(self, name: str) -> Iterator[dict[str, Any]]:
        """Yield the objects of a file of JSON Lines; a last line that was cut off is left out.

        Raises InputError if the file cannot be read, or a line has another form.
        """
        path = self.path / name
        if not path.exists():
            return
        for number, line in self._lines(path):
            try:
                entry = json.loads(line)
            except ValueError as error:
                raise InputError(
                    f"{path}: line {number} is not JSON: {error}; copy the file again"
                ) from None
            _require_form(path, entry, number)
            yield entry

    @staticmethod
    def _lines(path: Path) -> Iterator[tuple[int, str]]:
        """Yield number and text of each whole line."""
        try:
            with open(path, encoding="utf-8") as file:
                for number, line in enumerate(file, 1):
                    if line.endswith("\n"):
                        yield number, line
        except OSError as error:
            raise InputError(f"{path}: cannot be read: {error.strerror}; copy it again") from None
        except UnicodeDecodeError as error:
            raise InputError(f"{path}: is not UTF-8: {error}; copy it again") from None

    def json(self, name: str) -> Mapping[str, Any]:
        """Return the object of a JSON file of the run; empty if the run did not write it.

        Raises InputError if the file cannot be read, or has another form.
        """
        path = self.path / name
        if not path.exists():
            return {}
        document = read_json_object(path)
        _require_form(path, document)
        return document


def open_run(path: str | Path) -> FinishedRun:
    """Return the run in a directory.

    Raises InputError if the directory is not a run directory, or its summary cannot be read.
    """
    folder = at_home(str(path)).absolute()
    file = folder / "summary.json"
    if not file.is_file():
        raise InputError(f"{path}: is not a run directory (no {file.name}); name one in runs/")
    return FinishedRun(folder, read_summary(file))


def read_summary(file: Path) -> dict[str, Any]:
    """Return the contents of a ``summary.json``; raise InputError if it is damaged."""
    summary = read_json_object(file)
    version = summary.get("schema_version", 1)
    if isinstance(version, int) and version > SUMMARY_VERSION:
        raise InputError(
            f"{file}: schema_version = {version}: a later version of Espalier wrote it, and"
            f" this one reads up to {SUMMARY_VERSION}; install that version"
        )
    _require_form(file, summary)
    if not summary.keys() >= SUMMARY_KEYS:
        raise InputError(f"{file}: is not the summary of a run; restore it from a backup")
    return summary


def _require_form(path: Path, document: Any, line: int | None = None) -> None:
    # ``import espalier`` comes here, and takes no time for pydantic.
    from espalier.results.run_files import require_run_form

    require_run_form(path, document, line)
