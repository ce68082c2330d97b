"""Text of records as a source of passages."""

from collections.abc import Iterator
from dataclasses import dataclass

from espalier.data.files.corpus_index import Unit
from espalier.data.files.rows import Row, RowFile, group_of, text_of
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
        group together. A hash of the group is its label.
        """
        record = text_of(row, self.field, self.label_field)
        whole = digest(record.text)
        group = digest(group_of(row, self.group_field)) if self.group_field else None
        for passage in passages(record.text):
            # The hash of a whole record is known already.
            own = whole if passage == record.text else digest(passage)
            label = group.hex() if group else record.label
            yield Unit(passage, own, group or whole, group or own, label)

    def reading(self) -> list[str]:
        """Return what determines the passages of a record."""
        return ["text", self.field, self.label_field, self.group_field]
