"""Bundles that a warm node accepts: those with its own program, and no others."""

import io
import struct
import sys
import tracemalloc
import zipfile

import pytest
from flwr.cli.build import build_fab_from_disk

from client_app.node.warm_worker import AnotherProgramError, work
from espalier.identity import code_hash
from espalier.identity.code_hash import MAX_BYTES, MAX_ENTRIES, bundle_sha256, code_sha256
from tests.flower.test_warm_node import ROOT


@pytest.fixture(scope="module")
def bundle() -> bytes:
    """Return the bundle that ``flwr run`` would send from this checkout."""
    return build_fab_from_disk(ROOT)


def changed(bundle: bytes, name: str, content: bytes | None) -> bytes:
    """Return a bundle with one file replaced, added or, if ``content`` is None, removed."""
    found = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(bundle)) as before, zipfile.ZipFile(found, "w") as after:
        for entry in before.namelist():
            if entry != name:
                after.writestr(entry, before.read(entry))
        if content is not None:
            after.writestr(name, content)
    return found.getvalue()


def test_bundle_has_installed_program_s_hash(bundle: bytes) -> None:
    assert bundle_sha256(bundle) == code_sha256()
    # Settings are not part of the program's hash.
    assert bundle_sha256(changed(bundle, "conf/mine.toml", b"seed = 1")) == code_sha256()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("client_app/policy/egress_check.py", b"raise SystemExit"),
        ("client_app/app.py", None),
        ("espalier/further.py", b"pass"),
        ("pruning_kernels/votes/__init__.py", b""),
    ],
)
def test_other_program_is_refused_and_not_run(
    bundle: bytes, name: str, content: bytes | None
) -> None:
    before = set(sys.modules)
    with pytest.raises(AnotherProgramError, match=r"runs only its installed program "):
        work(changed(bundle, name, content), None, None)  # type: ignore[arg-type]
    assert not {
        module
        for module in set(sys.modules) - before
        if module.startswith(("client_app", "espalier.further"))
    }


def test_what_is_no_bundle_is_refused() -> None:
    with pytest.raises(zipfile.BadZipFile):
        work(b"no archive", None, None)  # type: ignore[arg-type]


def large(how: int, size: int, claimed: int) -> bytes:
    """Return a bundle with one file of zeros whose recorded size is wrong."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", how) as archive:
        archive.writestr("client_app/large.py", bytes(size))
    return packed.getvalue().replace(size.to_bytes(4, "little"), claimed.to_bytes(4, "little"))


@pytest.mark.parametrize("how", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_bundle_beyond_memory_is_refused(how: int) -> None:
    with pytest.raises(zipfile.BadZipFile, match="more than"):
        bundle_sha256(large(how, MAX_BYTES + 1, MAX_BYTES + 1))


def test_bundle_of_false_size_is_not_unpacked() -> None:
    bundle = large(zipfile.ZIP_DEFLATED, 8 * MAX_BYTES, 10)
    size = 8 * MAX_BYTES
    tracemalloc.start()
    with pytest.raises(zipfile.BadZipFile):
        bundle_sha256(bundle)
    assert tracemalloc.get_traced_memory()[1] < size // 8
    tracemalloc.stop()


def test_overlapping_files_are_refused() -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("client_app/a.py", bytes(1000))
        archive.writestr("client_app/b.py", bytes(1000))
    whole = packed.getvalue()
    assert bundle_sha256(whole)
    first, second = (info.header_offset for info in zipfile.ZipFile(packed).infolist())
    overlapping = whole[:second] + whole[zipfile.ZipFile(packed).start_dir :]  # type: ignore[attr-defined]
    with pytest.raises(zipfile.BadZipFile):
        bundle_sha256(overlapping)
    assert first == 0
    again = io.BytesIO()
    with zipfile.ZipFile(again, "w") as archive:
        archive.writestr("client_app/a.py", b"1")
        with pytest.warns(UserWarning, match="Duplicate name"):
            archive.writestr("client_app/a.py", b"2")
    with pytest.raises(zipfile.BadZipFile, match="files of the bundle overlap"):
        bundle_sha256(again.getvalue())


def test_damaged_or_oversized_bundle_is_refused() -> None:
    damaged = bytearray(large(zipfile.ZIP_DEFLATED, 100_000, 100_000))
    damaged[60:70] = b"\xff" * 10
    with pytest.raises(zipfile.BadZipFile):
        bundle_sha256(bytes(damaged))
    with pytest.raises(zipfile.BadZipFile, match="more than"):
        bundle_sha256(bytes(MAX_BYTES + 1))


def of_entries(number: int, name: str = "conf/{}") -> bytes:
    """Return a bundle of ``number`` files.

    All but the first exist only as entries of the archive's directory, which is quick to make.
    """
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("client_app/a.py", b"1")
    bare = packed.getvalue()[: -code_hash.END_RECORD.size]
    end = packed.getvalue()[-code_hash.END_RECORD.size :]
    entry = bare[bare.index(code_hash.ENTRY) :]
    more = b"".join(_entry(entry, name.format(place).encode()) for place in range(number - 1))
    size = len(entry) + len(more)
    start = len(bare) - len(entry)
    return bare + more + end[:8] + struct.pack("<2H2LH", 1, 1, size, start, 0)


def _entry(like: bytes, name: bytes) -> bytes:
    return like[:28] + struct.pack("<H", len(name)) + like[30:46] + name


def test_bundle_of_too_many_files_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The check does not rely on the number of files that the end record claims: here 1."""
    few = of_entries(MAX_ENTRIES)
    many = of_entries(MAX_ENTRIES + 1)
    long = of_entries(100, "conf/" + "x" * 30_000 + "{}")
    assert len(zipfile.ZipFile(io.BytesIO(many)).infolist()) == MAX_ENTRIES + 1
    assert bundle_sha256(few)
    monkeypatch.delattr(zipfile, "ZipFile")
    for bundle in (many, long):
        with pytest.raises(zipfile.BadZipFile, match="the bundle lists more than"):
            bundle_sha256(bundle)


def test_other_end_record_is_refused(bundle: bytes) -> None:
    """Python's reader searches for the end record, and it trusts the sizes of a ZIP64 file."""
    locator = code_hash.ZIP64_RECORD.pack(code_hash.END_OF_ZIP64, 0, 0, 1)
    start = len(bundle) - code_hash.END_RECORD.size
    for other in (
        bundle[:-2] + b"\1\0x",
        bundle + b"x",
        bundle[:start] + locator + bundle[start:],
        b"PK\5\6",
        b"",
    ):
        with pytest.raises(zipfile.BadZipFile, match="the bundle"):
            bundle_sha256(other)


def test_the_same_bundle_is_read_once(bundle: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node gets the bundle with every message.

    A refused bundle is refused again with the same error.
    """
    fault = "more than"
    found = bundle_sha256(bundle)
    refused = large(zipfile.ZIP_DEFLATED, MAX_BYTES + 1, MAX_BYTES + 1)
    with pytest.raises(zipfile.BadZipFile, match=fault):
        bundle_sha256(refused)
    monkeypatch.delattr(zipfile, "ZipFile")
    assert bundle_sha256(bytes(bytearray(bundle))) == found
    with pytest.raises(zipfile.BadZipFile, match=fault):
        bundle_sha256(refused)
    with pytest.raises(AttributeError):
        bundle_sha256(large(zipfile.ZIP_STORED, 10, 10))
    for number in range(code_hash.MAX_VERDICTS + 10):
        with pytest.raises(zipfile.BadZipFile):
            bundle_sha256(bytes([number]))
    assert len(code_hash._verdicts) == code_hash.MAX_VERDICTS


@pytest.mark.parametrize("how", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_other_compression_is_refused(how: int) -> None:
    with pytest.raises(zipfile.BadZipFile, match="is not packed as in"):
        bundle_sha256(large(how, 1000, 1000))
