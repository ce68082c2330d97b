"""Source code of Python's standard library: text that the demo model was not trained on.

There are twelve sources with different topics, one per client. Docstrings are removed, because the
demo model was trained on them (``espalier.data.builtin.documentation``). Comments are kept as part
of the code. The text differs slightly between Python versions.
"""

import ast
import importlib.util
from collections.abc import Iterator

from espalier.data.builtin.documentation import DOCUMENTED
from espalier.data.builtin.standard_library import module_files

MODULES: dict[str, tuple[str, ...]] = {
    source: tuple(names.split())
    for source, names in {
        "asyncio": "asyncio selectors sched",
        "numbers": "_pydecimal statistics fractions random datetime _pydatetime calendar colorsys",
        "web": "http urllib html wsgiref xmlrpc socketserver webbrowser",
        "testing": "unittest doctest trace timeit",
        "mail": "email mailbox smtplib poplib imaplib ftplib",
        "files": "pathlib shutil tempfile zipfile tarfile gzip lzma _pyio",
        "text": "difflib textwrap re string configparser json csv argparse optparse pprint",
        "debugging": "pdb bdb traceback cmd inspect dis profile pstats warnings linecache",
        "imports": "importlib pkgutil modulefinder venv sysconfig ast tokenize",
        "processes": "multiprocessing subprocess threading concurrent platform uuid",
        "data": "collections enum dataclasses functools contextlib typing weakref heapq types",
        "records": "logging xml pickle pickletools shelve dbm locale wave plistlib tomllib",
    }.items()
}
"""Standard-library modules and packages of each source.

Modules that a Python version lacks are skipped. Frozen modules (``os``, ``runpy`` ...) are left
out, because they have a file only if Python runs with ``-X frozen_modules=off``.
"""

SOURCES: tuple[str, ...] = tuple(MODULES)
"""Names of the twelve sources, in the order in which clients receive them."""


def texts(source: str) -> Iterator[str]:
    """Yield the files of one of ``SOURCES``, without their docstrings.

    Raises InputError if this Python installation has no files for it.
    """
    for file in module_files(MODULES[source], f"code source {source!r}"):
        yield without_docstrings(importlib.util.decode_source(file.read_bytes()))


def without_docstrings(code: str) -> str:
    """Return Python code without the docstrings of modules, classes and functions.

    Lines that hold only a docstring are removed; all other text stays as it is.
    """
    # Positions in a syntax tree count bytes of UTF-8, not characters.
    lines = code.encode().splitlines(keepends=True)
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            _cut(lines, node.body[0])
    return b"".join(lines).decode()


def _cut(lines: list[bytes], statement: ast.stmt) -> None:
    """Remove a statement from the lines in place; the list keeps its length."""
    first = statement.lineno - 1
    last = (statement.end_lineno or statement.lineno) - 1
    rest = lines[first][: statement.col_offset] + lines[last][statement.end_col_offset :]
    # A line that holds only blanks after the removal becomes an empty entry. The number of entries
    # must not change, because later statements are found by their line numbers.
    lines[first : last + 1] = [rest if rest.strip() else b""] + [b""] * (last - first)
