"""Detection of files that are not UTF-8 text, by their first bytes, for errors."""

import codecs
from collections.abc import Callable

UNPACK = "is compressed ({}); unpack it, and name the unpacked file"
CONVERT = "is {}, not UTF-8; convert it, for example with: iconv -f {} -t UTF-8"
RENAME = "is {} file; its name must end with {}"
OFFICE = (
    "is a zip archive, or an .xlsx or .docx file; unpack an archive and name its file, or save a"
    " table as CSV and a document as text"
)
EXPORT = "has the format {}, not text; write its records as JSON Lines, one object per line"

_BEGINNINGS: tuple[tuple[bytes, str], ...] = (
    (b"\x1f\x8b", UNPACK.format("gzip, twice or within another compression")),
    (b"\x28\xb5\x2f\xfd", UNPACK.format("Zstandard, twice or within another compression")),
    (b"\x50\x2a\x4d\x18", UNPACK.format("Zstandard, with another frame before it")),
    (b"BZh", UNPACK.format("bzip2")),
    (b"\xfd7zXZ\x00", UNPACK.format("xz")),
    (b"\x04\x22\x4d\x18", UNPACK.format("lz4")),
    (b"\x1f\x9d", UNPACK.format("compress")),
    (b"PK\x03\x04", OFFICE),
    (b"PK\x05\x06", UNPACK.format("an empty zip archive")),
    (b"7z\xbc\xaf\x27\x1c", UNPACK.format("7z")),
    (b"Rar!\x1a\x07", UNPACK.format("rar")),
    (b"PAR1", RENAME.format("a Parquet", ".parquet")),
    (b"ARROW1", RENAME.format("an Arrow", ".arrow")),
    (b"\xff\xff\xff\xff", RENAME.format("an Arrow", ".arrow")),
    (b"FEA1", EXPORT.format("Feather, version 1")),
    (b"ORC", EXPORT.format("ORC")),
    (b"Obj\x01", EXPORT.format("Avro")),
    (b"SQLite format 3\x00", EXPORT.format("SQLite")),
    (b"\x89HDF\r\n\x1a\n", EXPORT.format("HDF5")),
    (b"\x80\x04\x95", EXPORT.format("pickle")),
    (b"\x93NUMPY", EXPORT.format("NumPy")),
    (b"\xd0\xcf\x11\xe0", EXPORT.format("Microsoft Office")),
    (b"%PDF-", "is a PDF file, not text; extract its text"),
    (b"{\\rtf", "is an RTF file, not plain text; save it as plain text in UTF-8"),
    (
        b"version https://git-lfs.github.com/spec/",
        "is a Git LFS pointer instead of the file; fetch the file with: git lfs pull",
    ),
    (codecs.BOM_UTF32_LE, CONVERT.format("UTF-32", "UTF-32")),
    (codecs.BOM_UTF32_BE, CONVERT.format("UTF-32", "UTF-32")),
    (codecs.BOM_UTF16_LE, CONVERT.format("UTF-16", "UTF-16")),
    (codecs.BOM_UTF16_BE, CONVERT.format("UTF-16", "UTF-16")),
)
_NEVER_IN_TEXT = frozenset(
    {b"BZh", b"FEA1", b"ORC", b"PAR1", b"ARROW1", b"Obj\x01", b"PK\x03\x04", b"PK\x05\x06"}
)
"""Signatures that consist of letters and could begin a text.

They count only if bytes follow that do not occur in text.
"""
TAR_AT = 257
"""Offset of the signature ``ustar`` in a tar archive."""


def kind_refused(head: bytes) -> str:
    """Return the kind of a file and the remedy, for an error; empty if it may be UTF-8 text.

    Parameters
    ----------
    head : the first bytes of the file, at most ``compression.HEAD_BYTES``
    """
    for beginning, description in _BEGINNINGS:
        if head.startswith(beginning) and (beginning not in _NEVER_IN_TEXT or _is_binary(head)):
            return description
    # A tar archive begins with the name of a file, so its signature is further on.
    if head[TAR_AT : TAR_AT + 5] == b"ustar":
        return UNPACK.format("a tar archive")
    for name, is_encoded in _WITHOUT_MARK:
        if is_encoded(head):
            return CONVERT.format(f"{name} without a byte order mark", name)
    return ""


def _is_binary(head: bytes) -> bool:
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return True
    return b"\x00" in head


def _nul_at(places: tuple[int, ...], width: int) -> Callable[[bytes], bool]:
    """Return a test for text with ``width`` bytes per character.

    The test is passed if in most characters exactly the bytes at ``places`` are zero.
    """

    def is_encoded(head: bytes) -> bool:
        if b"\x00" not in head:
            return False
        whole = len(head) // width * width
        units = [head[start : start + width] for start in range(0, whole, width)]
        fits = sum(
            all((unit[place] == 0) == (place in places) for place in range(width)) for unit in units
        )
        return len(units) > 1 and 2 * fits > len(units)

    return is_encoded


_WITHOUT_MARK = (
    ("UTF-32LE", _nul_at((1, 2, 3), 4)),
    ("UTF-32BE", _nul_at((0, 1, 2), 4)),
    ("UTF-16LE", _nul_at((1,), 2)),
    ("UTF-16BE", _nul_at((0,), 2)),
)
