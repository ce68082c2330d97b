"""The default text: documentation that every Python installation has."""

import ast
import statistics
import sys
import textwrap
from pathlib import Path

import pytest

from espalier.data.builtin import documentation
from espalier.errors import EspalierError


def test_sixteen_sources_have_distinct_names() -> None:
    assert len(documentation.SOURCES) == len(set(documentation.SOURCES)) == 16


@pytest.mark.parametrize("source", ["language-types", "numbers"])
def test_a_source_has_text(source: str) -> None:
    texts = list(documentation.texts(source))
    assert sum(map(len, texts)) > 20_000
    assert all(isinstance(text, str) for text in texts)


def test_no_topic_or_module_has_two_sources() -> None:
    for table in (documentation.TOPICS, documentation.MODULES):
        names = [name for members in table.values() for name in members]
        assert len(names) == len(set(names))


def test_the_text_is_the_same_each_time() -> None:
    assert list(documentation.texts("numbers")) == list(documentation.texts("numbers"))


def test_only_docstrings_of_modules_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Docstrings of modules, classes, functions and coroutines are read.

    Comments, other strings and tests are not.
    """
    package = tmp_path / "documented_by_the_test"
    (package / "tests").mkdir(parents=True)
    (package / "tests" / "test_x.py").write_text('"""not this"""')
    (package / "__init__.py").write_text(
        textwrap.dedent('''
            """the module"""
            # not this
            X = "not this"
            class A:
                """the class"""
                def method(self):
                    """the method

                    indented
                    """
            async def wait():
                """the coroutine"""
            def silent(): ...
        ''')
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(
        documentation.MODULES, "numbers", ("documented_by_the_test", "no_such_module_anywhere")
    )
    assert set(documentation.texts("numbers")) == {
        "the module",
        "the class",
        "the method\n\nindented",
        "the coroutine",
    }


def test_the_files_are_read_and_never_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "explosive_module.py").write_text('"""calm"""\nraise SystemExit\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(documentation.MODULES, "numbers", ("explosive_module",))
    assert list(documentation.texts("numbers")) == ["calm"]


def test_missing_source_files_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(documentation.MODULES, "numbers", ("sys", "no_such_module_anywhere"))
    with pytest.raises(EspalierError, match="no source files for sys, no_such_module_anywhere"):
        list(documentation.texts("numbers"))


def test_missing_topics_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(EspalierError, match=r"pydoc_data.topics"):
        list(documentation.texts("language-types"))


def test_topics_this_python_lacks_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(documentation.TOPICS, "language-types", ("no such topic", "dict"))
    from pydoc_data.topics import topics

    assert list(documentation.texts("language-types")) == [topics["dict"]]


@pytest.mark.parametrize(
    "name", sorted({name for names in documentation.MODULES.values() for name in names})
)
def test_all_modules_are_in_standard_library(name: str) -> None:
    assert name in sys.stdlib_module_names


def test_docstrings_parse_on_this_python() -> None:
    """The files belong to the running interpreter, so its parser can read them."""
    assert ast.get_docstring(ast.parse(Path(statistics.__file__).read_bytes())) in set(
        documentation.texts("numbers")
    )
