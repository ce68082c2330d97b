"""Private and public parts of the texts of studies."""

from benchmarks.smaller.texts import MOST, parts


def test_parts_share_no_line_and_end_at_line_breaks() -> None:
    text = "".join(f"line {number}\n" for number in range(100))
    private, public = parts(text)
    assert private + public == text
    assert private.endswith("\n")
    assert 0.15 < len(public) / len(text) < 0.25


def test_long_private_part_is_cut_at_a_line_break() -> None:
    line = "x" * 99 + "\n"
    private, public = parts(line * (MOST // 50))
    assert len(private) == MOST
    assert len(public) == len(line) * (MOST // 50) // 5
