"""Model of which only the configuration exists, as a directory that can be opened like any other.

Its weights are holes: a sparse safetensors file with the names, dtypes and shapes that transformers
derives from ``config.json``. The file has its full size but takes no space on a file system that
supports sparse files. Code that reads headers finds the same as in the model's own files. Do not
compute with such a model: all its weights are zero.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from espalier.environment.hub_models import cached_model, is_on_hub
from espalier.errors import InputError
from espalier.hf.families import family_of, has_own_code
from espalier.hf.files.checkpoint import INDEX, SINGLE, STORED_DTYPES, shard_header
from espalier.hf.opening.config_file import CONFIG, explained, read_config
from espalier.hf.opening.model_files import copy_other_files
from espalier.hf.opening.opened_model import ANY_LABELS, OpenedModel, open_model, skeleton_of
from espalier.hf.structured.configuration import STRUCTURE_FILE
from espalier.messages.tensor_blobs import TensorSpec


@contextmanager
def opened(name: str) -> Iterator[OpenedModel]:
    """Open a model by name; one of the hub may have no weights in the cache yet.

    Errors, also those of the block that uses the model, name a model of the hub in place of a
    directory of the cache. Parameters and errors are those of ``open_model``.
    """
    if not is_on_hub(name):
        yield open_model(name)
        return
    cached = cached_model(name)
    directory = cached
    try:
        with described(cached) as directory:
            yield open_model(str(directory))
    except InputError as error:
        named = str(error)
        for place in (directory, cached):
            named = named.replace(str(place), name)
        raise InputError(named) from None


@contextmanager
def described(directory: Path) -> Iterator[Path]:
    """Yield a directory with the configuration and the weights of a model.

    If ``directory`` has weights, it is yielded itself. Otherwise a temporary directory with weights
    of zeros is created. Raises InputError if there are neither weights nor a configuration, or the
    directory holds a pruned model with block shapes of its own, which the configuration does not
    describe completely.
    """
    # Damaged weights are reported when they are opened; they must not be replaced by holes.
    if any(directory.glob("*.safetensors")) or any(directory.glob("*.bin")):
        yield directory
        return
    path = directory / CONFIG
    config = read_config(path)
    if (directory / STRUCTURE_FILE).exists() or has_own_code(config):
        raise InputError(
            f"{directory}: contains a smaller model without its weights; copy the weights there,"
            " or name the model from which it was made"
        )
    family = family_of(config, str(path))
    from transformers import AutoConfig

    with explained(str(path)):
        configuration = AutoConfig.for_model(**config)
    # Read the dtype first: building the modules changes the configuration's dtype.
    dtype = STORED_DTYPES.get(str(configuration.dtype).removeprefix("torch."), "F32")
    labels = ANY_LABELS if family.kind == "encoder" else None
    skeleton = skeleton_of(configuration, family, labels, str(path))
    specs = {
        name: TensorSpec(dtype, tuple(parameter.shape))
        for name, parameter in skeleton.named_parameters()
    }
    # Only the header has content.
    header = shard_header(specs)
    with TemporaryDirectory(prefix="espalier-described-") as folder:
        copy_other_files(directory, Path(folder), (INDEX,))
        with open(Path(folder) / SINGLE, "wb") as file:
            file.write(header)
            # Extending the file makes a hole, which reads as zeros.
            file.truncate(len(header) + sum(spec.num_bytes for spec in specs.values()))
        yield Path(folder)
