"""Text of records as a source of passages."""

from collections.abc import Iterator
from dataclasses import dataclass

from espalier.data.files.corpus_index import Unit
from espalier.data.files.files import CLIENT_KEYS, TextRows
from espalier.data.files.formats import open_rows
from espalier.data.files.rows import Row, RowFile, label_of, text_of
from espalier.data.passages import digest, passages


@dataclass(frozen=True)
class TextSource:
    """Files with a text in each record, whose passages are the units."""

    files: tuple[RowFile, ...]
    field: str = "text"
    """Field of a record that holds the text."""
    label_field: str = ""
    """Field that labels a record for the partition; empty: records have no labels."""
    group_field: str = ""
    """Field whose value joins records that are never separated; empty: every record is alone."""

    @property
    def columns(self) -> list[str]:
        """Fields that are read."""
        named = (self.field, self.label_field, self.group_field)
        return list(dict.fromkeys(name for name in named if name))

    def units(self, row: Row) -> Iterator[Unit[str]]:
        """Yield the passages of a record.

        A record is not divided among clients. Its passages are held out one by one, and those of a
        group together.
        """
        record = text_of(row, self.field, self.label_field)
        whole = digest(record.text)
        group = digest(label_of(row, self.group_field, "data.group")) if self.group_field else None
        for passage in passages(record.text):
            own = whole if passage == record.text else digest(passage)
            yield Unit(passage, own, group or whole, group or own, record.label)

    def reading(self) -> list[str]:
        """Return what determines the passages of a record."""
        return ["text", self.field, self.label_field, self.group_field]


def text_source(path: str, field: str, label_field: str = "", group_field: str = "") -> TextSource:
    """Return the text of the files that a path names (``formats.open_rows``).

    Text files have one record per passage and no fields.
    """
    files = tuple(open_rows(path, CLIENT_KEYS))
    if all(isinstance(file, TextRows) for file in files):
        return TextSource(files)
    return TextSource(files, field, label_field, group_field)
