"""Source code of the standard library, on which the tuning presets train."""

import ast
import functools
import importlib.util
import sys
import textwrap
from pathlib import Path

import pytest

from espalier.data.builtin import documentation, source_code
from espalier.data.builtin.built_in_texts import BUILT_IN, own_passages, public_part
from espalier.data.builtin.standard_library import module_files
from espalier.data.passages import digest, passages, split
from espalier.errors import EspalierError
from espalier.settings.tables.evaluation import BUILT_IN_TEXTS


@functools.cache
def code_of(source: str) -> list[str]:
    return list(source_code.texts(source))


def test_twelve_sources_have_distinct_texts() -> None:
    assert len(source_code.SOURCES) == len(set(source_code.SOURCES)) == 12
    names = [name for members in source_code.MODULES.values() for name in members]
    assert len(names) == len(set(names))
    for source in source_code.SOURCES:
        assert sum(map(len, code_of(source))) > 200_000


@pytest.mark.parametrize(
    "name", sorted({name for names in source_code.MODULES.values() for name in names})
)
def test_all_modules_are_in_standard_library(name: str) -> None:
    assert name in sys.stdlib_module_names or (sys.version_info < (3, 12) and name == "_pydatetime")


@pytest.mark.parametrize("source", source_code.SOURCES)
def test_no_module_is_a_frozen_one(source: str) -> None:
    """A frozen module has a file or none depending on how Python was started.

    The text would depend on it too.
    """
    specs = [importlib.util.find_spec(name) for name in source_code.MODULES[source]]
    assert [spec.name for spec in specs if spec is not None and spec.origin == "frozen"] == []


def test_docstrings_are_left_out_and_nothing_else() -> None:
    """Covers multi-byte letters, joined parts, statements that share a line with a docstring.

    Strings that are not docstrings stay.
    """
    code = textwrap.dedent('''
        # é is a comment
        """the module"""
        import os

        class A:
            """the class

            in three lines"""
            x = "ü"

            def one(self): "short"; return "not a docstring"

            async def two(self):
                # why
                "in " \\
                "two parts"
                """an expression"""
                return 2

        def silent(): ...
    ''')
    expected = textwrap.dedent('''
        # é is a comment
        import os

        class A:
            x = "ü"

            def one(self): ; return "not a docstring"

            async def two(self):
                # why
                """an expression"""
                return 2

        def silent(): ...
    ''')
    assert source_code.without_docstrings(code) == expected


def test_only_docstrings_are_removed_from_code() -> None:
    """The result has the syntax tree of the file without docstrings.

    Files that have functions with only a docstring are skipped.
    """
    compared = 0
    for file in module_files(source_code.MODULES["numbers"], "the test"):
        tree = ast.parse(file.read_bytes())
        documented = [
            node
            for node in ast.walk(tree)
            if isinstance(node, documentation.DOCUMENTED) and ast.get_docstring(node)
        ]
        for node in documented:
            del node.body[0]
        if all(node.body for node in documented):
            left = source_code.without_docstrings(importlib.util.decode_source(file.read_bytes()))
            assert ast.dump(ast.parse(left)) == ast.dump(tree)
            compared += 1
    assert compared > 2


def test_the_demo_model_was_trained_on_none_of_it() -> None:
    """The demo model was trained on the documentation.

    A doctest there and some modules share only their last two lines.
    """
    trained = {
        digest(passage)
        for source in documentation.SOURCES
        for text in documentation.texts(source)
        for passage in passages(text)
    }
    known = {
        passage
        for source in source_code.SOURCES
        for text in code_of(source)
        for passage in passages(text)
        if digest(passage) in trained
    }
    assert known <= {'if __name__ == "__main__":\n    _test()'}


def test_what_is_public_is_no_clients() -> None:
    public = set(map(digest, passages(public_part("code"))))
    for client in (0, 3, 12):
        own, held_out = split(own_passages("code", client, 14))
        assert own
        assert not public & set(map(digest, own))
        assert set(map(digest, held_out)) <= public


def test_the_text_is_the_same_each_time() -> None:
    assert list(source_code.texts("testing")) == list(source_code.texts("testing"))


def test_the_files_are_read_and_never_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "explosive_module.py").write_bytes(
        b'# -*- coding: latin-1 -*-\r\n"""calm"""\r\nraise SystemExit("\xe9")\r\n'
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(
        source_code.MODULES, "numbers", ("explosive_module", "no_such_module_anywhere")
    )
    assert list(source_code.texts("numbers")) == [
        '# -*- coding: latin-1 -*-\nraise SystemExit("é")\n'
    ]


def test_missing_source_files_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(source_code.MODULES, "numbers", ("sys", "no_such_module_anywhere"))
    with pytest.raises(
        EspalierError,
        match=r"code source 'numbers'.* no source files for sys, no_such_module_anywhere",
    ):
        list(source_code.texts("numbers"))


def test_the_settings_know_the_built_in_texts() -> None:
    assert tuple(BUILT_IN) == BUILT_IN_TEXTS
