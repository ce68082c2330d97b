"""Texts of four domains for studies: a private part for a client and a public part for evaluation.

    python -m benchmarks.smaller.texts DIRECTORY wiki=FILE c4=FILE stories=FILE

``code`` is Python's standard library, so it depends on the version of Python. The last fifth of
each text is public. Both parts end at a line break, and a private part has at most three million
characters.
"""

import argparse
import sysconfig
from pathlib import Path

MOST = 3_000_000
"""Maximum number of characters of a private part."""
CODE = "code"


def main() -> None:
    """Write ``<name>.txt`` and ``<name>-public.txt`` for each domain."""
    parser = argparse.ArgumentParser(prog="benchmarks.smaller.texts", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("texts", nargs="*", metavar="NAME=FILE")
    given = parser.parse_args()
    texts = dict(pair.split("=", 1) for pair in given.texts)
    given.directory.mkdir(parents=True, exist_ok=True)
    whole = {name: Path(file).read_text(encoding="utf-8") for name, file in texts.items()}
    for name, text in (whole | {CODE: _standard_library()}).items():
        private, public = parts(text)
        (given.directory / f"{name}.txt").write_text(private, encoding="utf-8")
        (given.directory / f"{name}-public.txt").write_text(public, encoding="utf-8")


def parts(text: str) -> tuple[str, str]:
    """Return the private and the public part of a text."""
    start = text.rindex("\n", 0, len(text) * 4 // 5) + 1
    private = text[:start]
    if len(private) > MOST:
        private = private[: private.rindex("\n", 0, MOST) + 1]
    return private, text[start:]


def _standard_library() -> str:
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(folder.glob("*.py"))
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


if __name__ == "__main__":
    main()
