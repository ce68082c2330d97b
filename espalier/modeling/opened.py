"""Open a model directory: its configuration, family, tensors, plan, tokenizer and hash; no weight is loaded yet.

transformers takes a second to import. Flower starts a process for every message, and many messages need no more than the
plan; so it is imported where a model or a tokenizer is made.
"""

import hashlib
import json
import math
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from espalier.modeling.checkpoint import Checkpoint
from espalier.modeling.families import Family, family_of
from espalier.settings.mistakes import Mistake
from espalier.wire.plan import BlockPlan, LinearPlan, ModelPlan

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")


class OpenedModel:
    """A model directory in Hugging Face layout."""

    def __init__(self, directory: Path) -> None:
        """Open a directory.

        Raises
        ------
        Mistake
            The directory, a file or a tensor is missing, or the model is of a kind that cannot be pruned.
        """
        self.directory = directory
        path = directory / "config.json"
        try:
            self.config: dict[str, Any] = json.loads(path.read_text())
            if not isinstance(self.config, dict):
                raise ValueError
        except FileNotFoundError:
            raise Mistake(
                f"model = {str(directory)!r}: has no config.json; name the directory of a Hugging Face model"
            ) from None
        except (OSError, ValueError):
            raise Mistake(f"{path}: is not a JSON file that can be read; copy the model again") from None
        self.family: Family = family_of(self.config, str(path))
        self.checkpoint = Checkpoint(directory)
        self.plan: ModelPlan = self._make_plan()

    def _make_plan(self) -> ModelPlan:
        key = self.family.num_blocks_key
        num_blocks = self.config.get(key)
        if not isinstance(num_blocks, int) or num_blocks < 1:
            raise Mistake(f"{self.directory / 'config.json'}: {key} = {num_blocks!r} must be a positive integer")
        if f"{self.family.blocks}.{num_blocks}." in " ".join(self.checkpoint.tensors):
            raise Mistake(
                f"{self.directory / 'config.json'}: {key} = {num_blocks}, but the files hold more blocks; copy the model again"
            )
        blocks = tuple(BlockPlan(index, tuple(self._linears(index))) for index in range(num_blocks))
        return ModelPlan(blocks, sum(math.prod(stored.shape) for stored in self.checkpoint.tensors.values()))

    def _linears(self, index: int) -> list[LinearPlan]:
        linears = []
        for name, module in self.family.linears.items():
            parameter = f"{self.family.blocks}.{index}.{module}.weight"
            stored = self.checkpoint.tensors.get(parameter)
            if stored is None or len(stored.shape) != 2:
                raise Mistake(f"{self.directory}: tensor {parameter} is missing or not a matrix; copy the model again")
            linears.append(LinearPlan(name, parameter, (stored.shape[0], stored.shape[1]), stored.dtype))
        return linears

    def new_skeleton(self) -> Any:
        """The model's modules without their weights: parameters on the meta device, buffers real, evaluation mode.

        Raises
        ------
        Mistake
            transformers cannot build a model from ``config.json``.
        """
        from accelerate import init_empty_weights
        from transformers import AutoConfig, AutoModelForCausalLM

        try:
            config = AutoConfig.from_pretrained(self.directory, local_files_only=True)
            with init_empty_weights(include_buffers=False):
                skeleton = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        except Exception as error:
            path, text = self.directory / "config.json", str(error).splitlines() or [""]
            raise Mistake(f"{path}: transformers cannot build this model: {type(error).__name__}: {text[0]}") from error
        return skeleton.eval()

    @cached_property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """The model's tokenizer."""
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(self.directory, local_files_only=True)
        except Exception as error:
            raise Mistake(
                f"{self.directory}: the tokenizer cannot be loaded ({type(error).__name__}); put it beside the model"
            ) from error

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the special tokens that the tokenizer adds by itself."""
        return self.tokenizer(text, verbose=False)["input_ids"]

    @cached_property
    def sha256(self) -> str:
        """Hash of the weights and the tokenizer: names, dtypes, shapes and bytes, however they are sharded."""
        digest = hashlib.sha256()
        for name in sorted(self.checkpoint.tensors):
            stored = self.checkpoint.tensors[name]
            digest.update(json.dumps([name, stored.dtype, list(stored.shape)]).encode())
            for chunk in self.checkpoint.chunks(name):
                digest.update(chunk)
        for file in TOKENIZER_FILES:
            if (path := self.directory / file).exists():
                digest.update(file.encode() + hashlib.sha256(path.read_bytes()).digest())
        return digest.hexdigest()


def open_model(name: str) -> OpenedModel:
    """Open ``demo``, the model that is installed with Espalier, or a directory.

    Raises
    ------
    Mistake
        See ``OpenedModel``.
    """
    if name != "demo":
        return OpenedModel(Path(name).expanduser().absolute())
    try:
        from espalier_assets import DEMO_MODEL
    except ModuleNotFoundError:
        raise Mistake("model = 'demo': espalier_assets is not installed on this machine; run: pip install -e .") from None
    return OpenedModel(DEMO_MODEL)
