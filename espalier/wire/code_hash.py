"""A hash of the program that a node runs, so that a server notices a node with another version of it."""

import hashlib
import importlib.util
import io
import struct
import zipfile
import zlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

PACKAGES = ("client_app", "espalier", "pruning_kernels")
"""What runs on a node."""
MOST_BYTES = 64 * 1024**2
"""Of all Python files of a bundle that run on a node, and of a bundle."""
MOST_ENTRIES = 8192
"""Files of a bundle, of which ours has some 500; Python's reader makes an object of each before it tells how many there are."""
MOST_DIRECTORY_BYTES = 1 << 21
"""Maximum bytes of the list of files at a bundle's end."""
MOST_VERDICTS = 64
"""Bundles of which a process remembers what it found: a node gets that of its run with every message."""
END = b"PK\5\6"
ENTRY = b"PK\1\2"
END_OF_ZIP64 = b"PK\6\7"
"""Signatures of a ZIP file's end, of an entry of its list, and of the locator of a ZIP64 end."""
END_RECORD = struct.Struct("<4s4H2LH")
ZIP64_RECORD = struct.Struct("<4sLQL")
PACKED = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""How they may be packed: both are unpacked in pieces, which Python's bz2 and lzma readers are not."""
PIECE = 1 << 20


@cache
def code_sha256() -> str:
    """SHA-256 over names and bytes of all Python files of the packages that run on a node."""
    files: dict[str, bytes] = {}
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise ModuleNotFoundError(f"package {package} is not installed")
        root = Path(next(iter(spec.submodule_search_locations)))
        files |= {
            f"{package}/{file.relative_to(root).as_posix()}": file.read_bytes()
            for file in root.rglob("*.py")
        }
    return _sha256(files.items())


_verdicts: dict[str, tuple[str, str]] = {}
"""Cache by SHA-256 of a bundle: hash of its program, or reason for refusal; the newest is last."""


def bundle_sha256(bundle: bytes) -> str:
    """The same of the program in a bundle of Flower's, a ZIP file; nothing of it is written, imported or run.

    What sizes the archive claims is not relied on: it is unpacked a piece at a time, and no further than ``MOST_BYTES``; and
    files that lie over each other, which would be unpacked again and again, are refused. The same bytes are read once.

    Raises
    ------
    zipfile.BadZipFile
        It is no ZIP file, is damaged or packed in a way that cannot be unpacked in pieces, is itself larger than
        ``MOST_BYTES``, has more files than ``MOST_ENTRIES``, or its program would take more memory than any release of ours.
    """
    if len(bundle) > MOST_BYTES:
        raise zipfile.BadZipFile(f"the bundle has more than {MOST_BYTES} bytes")
    key = hashlib.sha256(bundle).hexdigest()
    known = _verdicts.pop(key) if key in _verdicts else _verdict(bundle)
    _verdicts[key] = known  # the last of the dictionary, since the first ones go
    found, fault = known
    while len(_verdicts) > MOST_VERDICTS:
        _verdicts.pop(next(iter(_verdicts)))
    if fault:
        raise zipfile.BadZipFile(fault)
    return found


def _verdict(bundle: bytes) -> tuple[str, str]:
    try:
        _require_few_entries(bundle)
        return _of_program(bundle), ""
    except zipfile.BadZipFile as error:
        return "", str(error)
    except (EOFError, NotImplementedError, RuntimeError, ValueError, OSError, zlib.error) as error:
        return "", f"the bundle cannot be unpacked: {type(error).__name__}"


def _require_few_entries(bundle: bytes) -> None:
    """Raise BadZipFile if the list of files is larger than any of ours; the list is bytes still, of which none is unpacked.

    Python's reader goes by the size of the list, and not by the number of entries that the end of the file claims.
    """
    start = len(bundle) - END_RECORD.size
    if start < 0 or not bundle.startswith(END, start) or bundle[-2:] != b"\0\0":
        raise zipfile.BadZipFile("the bundle does not end as Flower's bundles do")
    if start >= ZIP64_RECORD.size and bundle.startswith(END_OF_ZIP64, start - ZIP64_RECORD.size):
        raise zipfile.BadZipFile("the bundle is a ZIP64 file, which Flower's bundles are not")
    size = END_RECORD.unpack_from(bundle, start)[5]
    if (
        size > min(MOST_DIRECTORY_BYTES, start)
        or bundle.count(ENTRY, start - size, start) > MOST_ENTRIES
    ):
        raise zipfile.BadZipFile(
            f"the bundle lists more than {MOST_ENTRIES} files, or more than {MOST_DIRECTORY_BYTES}"
            " bytes of them"
        )


def _of_program(bundle: bytes) -> str:
    with zipfile.ZipFile(io.BytesIO(bundle)) as archive:
        files = [file for file in archive.infolist() if file.filename.endswith(".py")]
        files = [file for file in files if file.filename.partition("/")[0] in PACKAGES]
        if sum(file.compress_size for file in files) > len(bundle) or len(
            {file.filename for file in files}
        ) < len(files):
            raise zipfile.BadZipFile("files of the bundle lie over each other")
        if strange := [file.filename for file in files if file.compress_type not in PACKED]:
            raise zipfile.BadZipFile(
                f"{strange[0][:200]!r} in the bundle is packed in another way than Flower's"
                " bundles are"
            )
        found = list[tuple[str, bytes]]()
        left = MOST_BYTES
        for file in files:
            found.append((file.filename, _unpacked(archive, file, left)))
            left -= len(found[-1][1])
        return _sha256(found)


def _unpacked(archive: zipfile.ZipFile, file: zipfile.ZipInfo, most: int) -> bytes:
    pieces = bytearray()
    with archive.open(file) as opened:
        while piece := opened.read(PIECE):
            pieces += piece
            if len(pieces) > most:
                raise zipfile.BadZipFile(f"the bundle's program has more than {MOST_BYTES} bytes")
    return bytes(pieces)


def _sha256(files: Iterable[tuple[str, bytes]]) -> str:
    digest = hashlib.sha256()
    for path, content in sorted(files, key=lambda entry: entry[0].split("/")):
        name = path.encode()
        digest.update(len(name).to_bytes(8, "big") + name + hashlib.sha256(content).digest())
    return digest.hexdigest()
