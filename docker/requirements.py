"""Print the distributions that an image needs: those of pyproject.toml, without what only a simulation takes.

    python requirements.py pyproject.toml [EXTRA ...]

Ray (the extra `simulation` of Flower) starts simulated clients. A deployment has real ones, so an image is installed
without it.
"""

import sys
import tomllib
from pathlib import Path

SIMULATION = "[simulation]"


def requirements(project: Path, extras: list[str]) -> list[str]:
    """Return the requirements of a project and of some of its extras, without those for simulations."""
    table = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
    wanted = [*table["dependencies"]]
    for extra in extras:
        wanted += table["optional-dependencies"][extra]
    return [requirement.replace(SIMULATION, "") for requirement in wanted]


if __name__ == "__main__":
    print("\n".join(requirements(Path(sys.argv[1]), sys.argv[2:])))
