"""Result table of a run's log for terminals that are narrower than the table.

A terminal would break the lines of the table in their middle. Instead each row becomes a short
list. Everything that is not a table is passed on unchanged.
"""

from collections.abc import Callable, Iterator

TOP = "┏"
BOTTOM = "└"
CELLS = ("┃", "│")
"""First characters of lines with cells: of the head, and of the body."""
INSIDE = (TOP, *CELLS, "┡", "├")
"""First characters of lines of a table that is not complete."""
NOTHING = "-"
"""Cell without a value."""


class NarrowTable:
    """Filter of lines, which go to ``say`` without line breaks; ``width`` returns columns."""

    def __init__(self, say: Callable[[str], None], width: Callable[[], int]) -> None:
        self._say = say
        self._width = width
        self._table: list[str] = []

    def __call__(self, line: str) -> None:
        """Receive a line; the lines of a table are passed on when it is complete."""
        if not self._table and not line.startswith(TOP):
            self._say(line)
            return
        self._table.append(line)
        if not line.startswith(INSIDE):
            self.flush()

    def flush(self) -> None:
        """Pass on the lines that are held back; all of them as they are if the table is broken."""
        table = self._table
        self._table = []
        fits = all(len(line) <= self._width() for line in table)
        complete = bool(table) and table[-1].startswith(BOTTOM)
        for line in table if fits or not complete else as_list(table):
            self._say(line)


def as_list(table: list[str]) -> Iterator[str]:
    """Yield each row of a table as its first cell and an indented line for each further value."""
    rows = [
        [cell.strip() for cell in line.replace(CELLS[1], CELLS[0]).strip(CELLS[0]).split(CELLS[0])]
        for line in table
        if line.startswith(CELLS)
    ]
    head, *body = rows
    widest = max(map(len, head[1:]), default=0)
    for first, *values in body:
        yield first
        for name, value in zip(head[1:], values, strict=True):
            if value != NOTHING:
                yield f"  {name:<{widest}}  {value}"
