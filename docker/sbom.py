"""Print an SBOM of this image in CycloneDX JSON: Python distributions and Debian packages.

    python sbom.py ENVIRONMENT-PYTHON

``cyclonedx-py`` (of the package cyclonedx-bom, next to this Python) reads the distributions, and
``dpkg-query`` lists the packages.
Does not cover: libraries inside a wheel, such as those in torch.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote

PACKAGE = r"${Package}\t${Version}\t${Architecture}\n"


def distributions(python: str) -> dict[str, Any]:
    """Return the SBOM of an environment's Python distributions."""
    command = [
        str(Path(sys.executable).with_name("cyclonedx-py")),
        "environment",
        python,
        "--output-format",
        "JSON",
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def debian_packages(listed: str) -> list[dict[str, str]]:
    """Return SBOM components for a list of Debian packages.

    Parameters
    ----------
    listed : lines with name, version and architecture, separated by tabs
    """
    found = []
    for line in listed.splitlines():
        name, version, architecture = line.split("\t")
        package = f"pkg:deb/debian/{quote(name)}@{quote(version, safe='')}?arch={architecture}"
        found.append(
            {
                "type": "library",
                "bom-ref": package,
                "name": name,
                "version": version,
                "purl": package,
            }
        )
    return found


if __name__ == "__main__":
    document = distributions(sys.argv[1])
    listed = subprocess.run(
        ["dpkg-query", "--show", "--showformat", PACKAGE],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    document["components"] += debian_packages(listed.stdout)
    print(json.dumps(document, indent=2))
