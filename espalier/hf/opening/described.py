"""A model of which there is no more than its configuration, as a directory that can be opened like any other.

Its weights are holes: a safetensors file with the names, dtypes and shapes that transformers makes of ``config.json``. It has
its full size and takes no room on a file system that knows holes. Whatever looks at headers finds what it would find in the
model's own files. Nothing should compute with it: what is read are zeros.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from espalier.errors import Mistake
from espalier.hf.families import family_of
from espalier.hf.files.checkpoint import INDEX, Checkpoint, shard_header
from espalier.hf.opening.config_file import CONFIG, explained, read_config
from espalier.hf.opening.model_files import copy_beside
from espalier.hf.opening.opened import skeleton_of
from espalier.hf.structured.configuration import STRUCTURE_FILE
from espalier.messages.payload import DTYPE_BYTES

STORED = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""safetensors' name of the dtypes that a configuration may name."""
ANY_LABELS = 2
"""An encoder's head has some number of classes, and is made anew when it is tuned."""


@contextmanager
def described(directory: Path) -> Iterator[Path]:
    """A directory with the model's configuration and weights, real ones if ``directory`` has them.

    Raises
    ------
    Mistake
        There is neither; or it is a smaller model with blocks of its own, of which the configuration does not say all.
    """
    try:
        Checkpoint(directory)
    except Mistake:
        if _has_weights(directory):
            raise
        if not (directory / CONFIG).is_file():
            raise Mistake(f"{directory}: has no {CONFIG}; name the directory of a model") from None
    else:
        yield directory
        return
    if (directory / STRUCTURE_FILE).exists():
        raise Mistake(
            f"{directory}: holds a smaller model without its weights; put them there, or name the"
            " model that it was made of"
        )
    with TemporaryDirectory(prefix="espalier-described-") as folder:
        copy_beside(directory, Path(folder), (INDEX,))
        _write_holes(directory, Path(folder))
        yield Path(folder)


def _has_weights(directory: Path) -> bool:
    """Whether there are files of weights, which are damaged then."""
    return any(directory.glob("*.safetensors")) or any(directory.glob("*.bin"))


def _write_holes(directory: Path, folder: Path) -> None:
    path = directory / CONFIG
    config = read_config(path)
    family = family_of(config, str(path))
    from transformers import AutoConfig

    with explained(str(path)):
        known = AutoConfig.for_model(
            **{key: value for key, value in config.items() if key != "quantization_config"}
        )
    # Building the modules changes it.
    dtype = STORED.get(str(known.dtype).removeprefix("torch."), "F32")
    skeleton = skeleton_of(
        known, family, ANY_LABELS if family.kind == "encoder" else None, str(path)
    )
    shapes = {name: tuple(parameter.shape) for name, parameter in skeleton.named_parameters()}
    specs = {
        name: (dtype, shape, DTYPE_BYTES[dtype] * parameter.numel())
        for (name, parameter), shape in zip(
            skeleton.named_parameters(), shapes.values(), strict=True
        )
    }
    header = shard_header(specs, {"format": "pt"})
    with open(folder / "model.safetensors", "wb") as file:
        file.write(header)
        file.truncate(len(header) + sum(size for _, _, size in specs.values()))
