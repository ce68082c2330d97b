"""A hash of the program that a node runs, so that a server notices a node with another version of it."""

import hashlib
import importlib.util
import io
import zipfile
import zlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

PACKAGES = ("client_app", "espalier", "pruning_kernels")
"""What runs on a node."""
MOST_BYTES = 64 * 1024**2
"""Of all Python files of a bundle that run on a node, and of a bundle."""
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
        files |= {f"{package}/{file.relative_to(root).as_posix()}": file.read_bytes() for file in root.rglob("*.py")}
    return _sha256(files.items())


def bundle_sha256(bundle: bytes) -> str:
    """The same of the program in a bundle of Flower's, a ZIP file; nothing of it is written, imported or run.

    What sizes the archive claims is not relied on: it is unpacked a piece at a time, and no further than ``MOST_BYTES``; and
    files that lie over each other, which would be unpacked again and again, are refused.

    Raises
    ------
    zipfile.BadZipFile
        It is no ZIP file, is damaged or packed in a way that cannot be unpacked in pieces, is itself larger than
        ``MOST_BYTES``, or its program would take more memory than any release of ours.
    """
    if len(bundle) > MOST_BYTES:
        raise zipfile.BadZipFile(f"the bundle has more than {MOST_BYTES} bytes")
    try:
        return _of_program(bundle)
    except (EOFError, NotImplementedError, RuntimeError, ValueError, OSError, zlib.error) as error:
        raise zipfile.BadZipFile(f"the bundle cannot be unpacked: {type(error).__name__}") from None


def _of_program(bundle: bytes) -> str:
    with zipfile.ZipFile(io.BytesIO(bundle)) as archive:
        files = [file for file in archive.infolist() if file.filename.endswith(".py")]
        files = [file for file in files if file.filename.partition("/")[0] in PACKAGES]
        if sum(file.compress_size for file in files) > len(bundle) or len({file.filename for file in files}) < len(files):
            raise zipfile.BadZipFile("files of the bundle lie over each other")
        if strange := [file.filename for file in files if file.compress_type not in PACKED]:
            raise zipfile.BadZipFile(f"{strange[0][:200]!r} in the bundle is packed in another way than Flower's bundles are")
        found, left = list[tuple[str, bytes]](), MOST_BYTES
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
