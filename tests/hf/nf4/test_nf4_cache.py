"""The node's NF4 cache gives the bits of a fresh quantisation, whatever happened to its files."""

import multiprocessing
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from espalier.errors import EspalierError
from espalier.hf.nf4 import cache as quantised_cache
from espalier.hf.nf4.cache import key_parts, quantised_linears
from espalier.hf.opening.opened_model import OpenedModel
from espalier.storage.client_state import VERSION_FILE, collect_old_runs, mark_as_ours
from espalier.storage.tensor_cache import cache_key
from tests.hf.tiny_models import llama_config, save_model

CPU = torch.device("cpu")
MATRIX = "model.layers.1.mlp.up_proj.weight"
Bits = dict[str, dict[str, bytes]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = llama_config(hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    return save_model(tmp_path_factory.mktemp("nf4"), config)


@pytest.fixture
def model(directory: Path) -> OpenedModel:
    return OpenedModel(directory)


@pytest.fixture
def quantised(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Shapes of the quantised matrices, in order."""
    shapes = []
    work = quantised_cache.quantise

    def counted(*arguments, **named):  # type: ignore[no-untyped-def]
        shapes.append(arguments[1])
        return work(*arguments, **named)

    monkeypatch.setattr(quantised_cache, "quantise", counted)
    return shapes


def bits(model: OpenedModel, cache: Path | None, device: torch.device = CPU) -> Bits:
    """Return the bytes of every tensor of every matrix."""
    return {
        linear.parameter: {
            name: bytes(tensor.cpu().numpy().tobytes()) for name, tensor in matrix.tensors.items()
        }
        for linear, matrix in quantised_linears(model, device, cache)
    }


def folder_of(model: OpenedModel, cache: Path) -> Path:
    return cache / cache_key(key_parts(model))


def file_of(model: OpenedModel, cache: Path, name: str = MATRIX) -> Path:
    return folder_of(model, cache) / name


def test_what_is_used_stays_and_what_is_not_goes(
    model: OpenedModel, tmp_path: Path, quantised: list[tuple[int, int]]
) -> None:
    root = tmp_path / "state"
    long_ago = 1_000_000.0
    cache = root / "quantised"
    other = OpenedModel(
        save_model(tmp_path / "other", llama_config(hidden_size=64, intermediate_size=128))
    )
    bits(model, cache)
    bits(other, cache)
    for folder in cache.iterdir():
        os.utime(folder / "lock", (long_ago, long_ago))
    quantised.clear()
    bits(model, cache)
    collect_old_runs(root, long_ago + 1)
    assert not quantised
    assert file_of(model, cache).exists()
    assert not folder_of(other, cache).exists()


def test_second_load_does_not_quantise_again(
    model: OpenedModel,
    tmp_path: Path,
    quantised: list[tuple[int, int]],
    device: torch.device,
) -> None:
    fresh = bits(model, None, device)
    assert len(fresh) == len(quantised) == 14
    assert bits(model, tmp_path / "cache", device) == fresh
    assert len(quantised) == 28
    assert bits(OpenedModel(model.directory), tmp_path / "cache", device) == fresh
    assert len(quantised) == 28


def test_model_is_refused_before_quantisation(
    tmp_path: Path, quantised: list[tuple[int, int]]
) -> None:
    config = llama_config(hidden_size=64, intermediate_size=96)
    narrow = OpenedModel(save_model(tmp_path / "model", config))
    with pytest.raises(
        EspalierError,
        match=r"base = .nf4.: model.layers.0.mlp.down_proj.weight has 96 input features",
    ):
        bits(narrow, tmp_path / "cache")
    assert not quantised
    assert not (tmp_path / "cache").exists()


def test_other_models_or_modes_have_own_folders(
    model: OpenedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = OpenedModel(
        save_model(tmp_path / "other", llama_config(hidden_size=64, intermediate_size=128))
    )
    keys = [cache_key(key_parts(model)), cache_key(key_parts(other))]
    monkeypatch.setattr(quantised_cache.bitsandbytes(), "__version__", "0.51.0")
    keys.append(cache_key(key_parts(model)))
    assert len(set(keys)) == 3


def test_nobody_else_can_read_it(model: OpenedModel, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    bits(model, cache)
    folder = folder_of(model, cache)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (cache, folder)] == [0o700, 0o700]
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert {path.name for path in folder.iterdir()} == {*bits(model, None), "lock", VERSION_FILE}


# ----- damage -------------------------------------------------------------------------------------


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 100)


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def one_bit_at(place: float) -> Callable[[Path], None]:
    def flip(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[int(len(data) * place)] ^= 1
        path.write_bytes(data)

    return flip


def of_another_matrix(path: Path) -> None:
    path.write_bytes(path.with_name(path.name.replace("layers.1", "layers.0")).read_bytes())


DAMAGES = [cut, emptied, os.unlink, one_bit_at(0.01), one_bit_at(0.999), of_another_matrix]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_made_anew(
    model: OpenedModel,
    tmp_path: Path,
    damage: Callable[[Path], None],
    quantised: list[tuple[int, int]],
) -> None:
    expected = bits(model, tmp_path)
    damage(file_of(model, tmp_path))
    assert bits(model, tmp_path) == expected
    assert len(quantised) == 15
    assert bits(model, tmp_path) == expected
    assert len(quantised) == 15


def test_what_a_killed_process_left_is_removed(model: OpenedModel, tmp_path: Path) -> None:
    folder = folder_of(model, tmp_path)
    folder.mkdir(parents=True)
    # A process marks the directory before it writes any file there.
    mark_as_ours(folder)
    (folder / f".{MATRIX}.abcd").write_bytes(b"half")
    bits(model, tmp_path)
    assert not list(folder.glob(f".{MATRIX}.*"))


def test_a_load_that_ends_half_way_is_continued(
    model: OpenedModel, tmp_path: Path, quantised: list[tuple[int, int]]
) -> None:
    linears = quantised_linears(model, CPU, tmp_path)
    next(linears)
    linears.close()  # type: ignore[attr-defined]
    assert len(bits(model, tmp_path)) == len(quantised) == 14


def test_a_folder_that_cannot_be_written_is_named(model: OpenedModel, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EspalierError, match="file"):
        bits(model, tmp_path / "file")


# ----- two processes ------------------------------------------------------------------------------


def _load(directory: Path, cache: Path, together: object, found: object) -> None:
    shapes: list[tuple[int, int]] = []
    work = quantised_cache.quantise

    def counted(*arguments, **named):  # type: ignore[no-untyped-def]
        shapes.append(arguments[1])
        return work(*arguments, **named)

    quantised_cache.quantise = counted  # type: ignore[assignment]
    torch.set_num_threads(1)
    model = OpenedModel(directory)
    together.wait()  # type: ignore[attr-defined]
    found.put((len(shapes), bits(model, cache), len(shapes)))  # type: ignore[attr-defined]


def test_concurrent_loads_quantise_each_once(model: OpenedModel, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    together = context.Barrier(3)
    found = context.Queue()
    processes = [
        context.Process(target=_load, args=(model.directory, tmp_path, together, found))
        for _ in range(3)
    ]
    for process in processes:
        process.start()
    results = [found.get(timeout=600) for _ in processes]
    for process in processes:
        process.join()
    fresh = bits(model, None)
    assert all(loaded == fresh for _, loaded, _ in results)
    assert sum(count for _, _, count in results) == 14
    assert bits(model, tmp_path) == fresh
