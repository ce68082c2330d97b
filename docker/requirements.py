"""Print the distributions that an image needs: those of pyproject.toml without simulation.

    python requirements.py pyproject.toml [EXTRA ...]

Ray (Flower's extra `simulation`) runs simulated clients. A deployment has real ones, so an image
does not contain it.
"""

import sys
import tomllib
from pathlib import Path

SIMULATION = "[simulation]"


def requirements(project: Path, extras: list[str]) -> list[str]:
    """Return the requirements of a project and some of its extras, without simulation."""
    table = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
    wanted = [*table["dependencies"]]
    for extra in extras:
        wanted += table["optional-dependencies"][extra]
    return [requirement.replace(SIMULATION, "") for requirement in wanted]


if __name__ == "__main__":
    print("\n".join(requirements(Path(sys.argv[1]), sys.argv[2:])))
