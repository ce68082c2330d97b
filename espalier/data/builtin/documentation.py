"""Documentation text of Python itself: language topics and docstrings of the standard library.

It is the default private data of a run: sixteen sources with different topics, one per client. The
text differs slightly between Python versions, so results repeat only for the same version.
"""

import ast
from collections.abc import Iterator

from espalier.data.builtin.standard_library import module_files
from espalier.errors import InputError

TOPICS: dict[str, tuple[str, ...]] = {
    "language-statements": (
        "compound", "assignment", "try", "raise", "with", "class", "function", "async", "for",
        "while", "if", "augassign", "assert", "del", "return", "global", "nonlocal", "import",
        "break", "continue", "pass", "debugger", "else",
    ),
    "language-data-model": (
        "specialnames", "customization", "attribute-access", "sequence-types", "numeric-types",
        "context-managers", "callable-types", "objects", "execmodel", "naming", "dynamic-features",
        "exceptions",
    ),
    "language-types": (
        "types", "typesseq", "typesmapping", "typesmethods", "typesmodules", "typesfunctions",
        "typesseq-mutable", "dict", "bltin-code-objects", "bltin-null-object", "bltin-type-objects",
        "bltin-ellipsis-object", "booleans", "truth",
    ),
    "language-expressions": (
        "formatstrings", "string-methods", "comparisons", "strings", "operator-summary", "calls",
        "identifiers", "binary", "subscriptions", "slicings", "exprlists", "atom-identifiers",
        "id-classes", "power", "unary", "bitwise", "lambda", "in", "integers", "floating",
        "imaginary", "lists", "yield", "conversions", "attribute-references", "await",
    ),
}  # fmt: skip
"""Topics of ``pydoc_data.topics`` of each source; topics that a Python version lacks are skipped.
"""

MODULES: dict[str, tuple[str, ...]] = {
    source: tuple(names.split())
    for source, names in {
        "asyncio": "asyncio concurrent selectors queue sched",
        "mail": "email mailbox smtplib mimetypes poplib imaplib",
        "web": "http urllib html wsgiref xmlrpc socketserver socket ssl ipaddress",
        "numbers": "_pydecimal decimal statistics fractions random numbers colorsys",
        "testing": "unittest doctest trace timeit",
        "debugging": "pdb bdb traceback cmd code codeop profile pstats inspect dis warnings",
        "imports": "importlib pkgutil zipimport runpy site venv sysconfig ast tokenize pyclbr",
        "files": "pathlib shutil tempfile zipfile tarfile gzip bz2 lzma fileinput os _pyio",
        "text": "difflib textwrap re string configparser json csv argparse optparse codecs",
        "processes": "multiprocessing subprocess threading _threading_local signal platform uuid",
        "data": (
            "collections _collections_abc enum datetime dataclasses functools contextlib typing"
        ),
        "records": "logging xml encodings pickle pickletools shelve dbm calendar locale wave",
    }.items()
}
"""Standard-library modules and packages of each source; missing modules are skipped."""

SOURCES: tuple[str, ...] = (*TOPICS, *MODULES)
"""Names of the sixteen sources, in the order in which clients receive them."""

DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
"""Nodes of a syntax tree that can have a docstring."""


def texts(source: str) -> Iterator[str]:
    """Yield the texts of one of ``SOURCES``.

    Raises InputError if this Python installation has neither its topics nor its module files.
    """
    if source in TOPICS:
        yield from _topics(TOPICS[source])
    else:
        yield from _docstrings(source, MODULES[source])


def _topics(names: tuple[str, ...]) -> Iterator[str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise InputError(
            "documentation: this Python installation has no pydoc_data.topics; install its full"
            " standard library, or give the node a data-path of its own"
        ) from None
    for name in names:
        if name in topics:
            yield topics[name]


def _docstrings(source: str, names: tuple[str, ...]) -> Iterator[str]:
    for file in module_files(names, f"documentation source {source!r}"):
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, DOCUMENTED) and (doc := ast.get_docstring(node)):
                yield doc
