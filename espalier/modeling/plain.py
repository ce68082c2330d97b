"""A decoder as plain ``AutoModelForCausalLM.from_pretrained`` loads it, with its blocks left on the disk.

What Espalier reads and writes is compared with it. transformers chooses the files, names, ties and computes; each block's
weights are read when it runs, so that a model larger than memory can be compared too.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn

from espalier.modeling.computing import Computing
from espalier.modeling.config_file import CONFIG, explained, read_config
from espalier.modeling.families import Family, has_own_code
from espalier.modeling.opened import skeleton_of
from espalier.modeling.quantised_layout import CONFIG_KEY
from espalier.modeling.structured.configuration import build_config


@contextmanager
def plain_model(directory: Path, family: Family, computing: Computing) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Load a model's directory with transformers, in the computing dtype and in evaluation mode.

    Yields
    ------
    The model, and what transformers says of its loading: ``missing_keys``, ``unexpected_keys`` and the like. A model that the
    files hold in NF4 is in memory whole, since bitsandbytes cannot leave it on the disk.

    Raises
    ------
    Mistake
        transformers cannot load it; its reason is named.
    """
    from transformers import AutoModelForCausalLM

    config = read_config(directory / CONFIG)
    with TemporaryDirectory(prefix="espalier-plain-") as folder, quiet():
        with explained(str(directory)):
            devices = {"": str(computing.device)}
            if not config.get(CONFIG_KEY):
                devices = _devices(directory, family, config, str(computing.device))
            loaded, told = AutoModelForCausalLM.from_pretrained(
                directory,
                local_files_only=True,
                trust_remote_code=False,
                dtype=computing.dtype,
                device_map=devices,
                offload_folder=folder,
                output_loading_info=True,
            )
        yield loaded.eval(), told


def _devices(directory: Path, family: Family, config: dict[str, Any], device: str) -> dict[str, str]:
    """Return where each module is to lie: the blocks on the disk, all others on the device."""
    from transformers import AutoConfig

    if has_own_code(config):
        known = build_config(config)
    else:
        known = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    skeleton = skeleton_of(known, family, None, str(directory / CONFIG))
    return {family.blocks: "disk", **dict.fromkeys(_beside(skeleton, family.blocks), device)}


def _beside(module: nn.Module, blocks: str, path: str = "") -> Iterator[str]:
    """Yield the paths of the largest modules that do not hold the blocks."""
    for name, child in module.named_children():
        own = f"{path}.{name}" if path else name
        if blocks.startswith(f"{own}."):
            yield from _beside(child, blocks, own)
        elif own != blocks:
            yield own


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers and accelerate from warning of what is checked here, and from drawing bars."""
    from transformers.utils import logging as transformers_logging

    accelerate = logging.getLogger("accelerate.big_modeling")
    before = transformers_logging.get_verbosity(), accelerate.level
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    accelerate.setLevel(logging.ERROR)
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before[0])
        accelerate.setLevel(before[1])
