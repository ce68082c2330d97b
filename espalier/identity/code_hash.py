"""Hash of the program that a node runs, by which a server detects a node with another version."""

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
"""Packages that run on a node."""
MAX_BYTES = 64 * 1024**2
"""Maximum size in bytes of a bundle, and of all Python files in it that run on a node."""
MAX_ENTRIES = 8192
"""Maximum number of files in a bundle; ours has about 500.

Python's ``zipfile`` creates an object for each listed file before the number is known.
"""
MAX_DIRECTORY_BYTES = 1 << 21
"""Maximum size in bytes of the list of files at the end of a bundle."""
MAX_VERDICTS = 64
"""Number of bundles whose result a process remembers.

A node receives the bundle of its run with every message.
"""
END = b"PK\5\6"
"""Signature of the end record of a ZIP file."""
ENTRY = b"PK\1\2"
"""Signature of an entry in the file list of a ZIP file."""
END_OF_ZIP64 = b"PK\6\7"
"""Signature of the locator of a ZIP64 end record."""
END_RECORD = struct.Struct("<4s4H2LH")
ZIP64_RECORD = struct.Struct("<4sLQL")
PACKED = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""Permitted compression methods.

Both can be unpacked up to a limit, unlike the bz2 and lzma readers of Python.
"""


@cache
def code_sha256() -> str:
    """Return the SHA-256 over the names and bytes of all Python files of ``PACKAGES``."""
    files: dict[str, bytes] = {}
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise ModuleNotFoundError(f"package {package} is not installed")
        root = Path(next(iter(spec.submodule_search_locations)))
        # By the installed location, so an installed and a copied program have the same hash.
        files |= {
            f"{package}/{file.relative_to(root).as_posix()}": file.read_bytes()
            for file in root.rglob("*.py")
        }
    return _sha256(files.items())


_verdicts: dict[str, tuple[str, str]] = {}
"""Results by SHA-256 of a bundle, newest last: hash of its program, and reason for refusal.

One of the two is empty.
"""


def bundle_sha256(bundle: bytes) -> str:
    """Return the hash of the program in a Flower bundle, as ``code_sha256`` computes it.

    Nothing in the ZIP file is written to disk, imported or run. The sizes that it claims are not
    trusted: at most ``MAX_BYTES`` are unpacked. Overlapping files, which could be unpacked many
    times, are refused. A bundle with the same bytes is read once. Raises zipfile.BadZipFile for
    anything that Flower would not make.
    """
    # Size first: everything below reads the bundle.
    if len(bundle) > MAX_BYTES:
        raise zipfile.BadZipFile(f"the bundle has more than {MAX_BYTES} bytes")
    key = hashlib.sha256(bundle).hexdigest()
    # Popped and put back, so that the dictionary is in order of use.
    verdict = _verdicts.pop(key, None) or _verdict(bundle)
    # The newest bundle is the last, since the oldest ones at the beginning are removed.
    _verdicts[key] = verdict
    sha256, fault = verdict
    while len(_verdicts) > MAX_VERDICTS:
        _verdicts.pop(next(iter(_verdicts)))
    if fault:
        raise zipfile.BadZipFile(fault)
    return sha256


def _verdict(bundle: bytes) -> tuple[str, str]:
    try:
        _require_few_entries(bundle)
        return _of_program(bundle), ""
    except zipfile.BadZipFile as error:
        return "", str(error)
    except (EOFError, NotImplementedError, RuntimeError, ValueError, OSError, zlib.error) as error:
        return "", f"the bundle cannot be unpacked: {type(error).__name__}"


def _require_few_entries(bundle: bytes) -> None:
    """Check the list of files of a ZIP file before Python's reader sees it.

    That reader relies on the size of the list, not on the number that the end record claims.
    """
    start = len(bundle) - END_RECORD.size
    # The last two bytes are the length of a comment, which Flower's bundles do not have.
    if start < 0 or not bundle.startswith(END, start) or bundle[-2:] != b"\0\0":
        raise zipfile.BadZipFile("the end of the bundle is not that of a Flower bundle")
    if start >= ZIP64_RECORD.size and bundle.startswith(END_OF_ZIP64, start - ZIP64_RECORD.size):
        raise zipfile.BadZipFile("the bundle is a ZIP64 file, which Flower's bundles are not")
    # Size of the list of files, from the end record.
    size = END_RECORD.unpack_from(bundle, start)[5]
    if (
        size > min(MAX_DIRECTORY_BYTES, start)
        or bundle.count(ENTRY, start - size, start) > MAX_ENTRIES
    ):
        raise zipfile.BadZipFile(
            f"the bundle lists more than {MAX_ENTRIES} files, or its list has more than"
            f" {MAX_DIRECTORY_BYTES} bytes"
        )


def _of_program(bundle: bytes) -> str:
    with zipfile.ZipFile(io.BytesIO(bundle)) as archive:
        # Other files of the bundle do not run on a node.
        files = [file for file in archive.infolist() if file.filename.endswith(".py")]
        files = [file for file in files if file.filename.partition("/")[0] in PACKAGES]
        # Overlapping files claim more compressed bytes than the bundle has.
        if sum(file.compress_size for file in files) > len(bundle) or len(
            {file.filename for file in files}
        ) < len(files):
            raise zipfile.BadZipFile("files of the bundle overlap")
        if unsupported := [file.filename for file in files if file.compress_type not in PACKED]:
            raise zipfile.BadZipFile(
                f"{unsupported[0][:200]!r} in the bundle is not packed as in Flower's bundles"
            )
        contents = list[tuple[str, bytes]]()
        # A total limit, because many small claims could add up.
        remaining = MAX_BYTES
        for file in files:
            # The claimed size only makes the buffer small; it may be too small or too large.
            with archive.open(file) as handle:
                # One byte more than claimed, so that a file that is too large is noticed.
                content = handle.read(min(file.file_size, remaining) + 1)
            remaining -= len(content)
            if remaining < 0:
                raise zipfile.BadZipFile(f"the bundle's program has more than {MAX_BYTES} bytes")
            contents.append((file.filename, content))
        return _sha256(contents)


def _sha256(files: Iterable[tuple[str, bytes]]) -> str:
    digest = hashlib.sha256()
    # Sort by path components, as ``Path`` objects do.
    for path, content in sorted(files, key=lambda entry: entry[0].split("/")):
        name = path.encode()
        # The length prefix makes the boundary between name and content unambiguous.
        digest.update(len(name).to_bytes(8, "big") + name + hashlib.sha256(content).digest())
    return digest.hexdigest()
