"""Open a model directory: its configuration, family, tensors, plan, tokenizer and hash; no weight is loaded yet.

torch and transformers take a second each to import. Flower starts a process for every message, and many messages need no more
than the plan; so they are imported where a model or a tokenizer is made, or a weight is read.
"""

import hashlib
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from espalier.modeling.checkpoint import Checkpoint
from espalier.modeling.families import Family, family_of
from espalier.pace.beats import beats
from espalier.settings.home import at_home
from espalier.settings.hub_names import require_model
from espalier.settings.mistakes import Mistake
from espalier.wire.plan import BlockPlan, LinearPlan, ModelPlan

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt", "sentencepiece.bpe.model")
TOKENIZER_SETTINGS = ("config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


class OpenedModel:
    """A model directory in Hugging Face layout."""

    def __init__(self, directory: Path) -> None:
        """Open a directory.

        Raises
        ------
        Mistake
            The directory, a file or a tensor is missing, or the model is of a kind that is not supported.
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
        beyond = tuple(self.family.file_names(f"{self.family.blocks}.{num_blocks}."))
        if any(name.startswith(beyond) for name in self.checkpoint.tensors):
            raise Mistake(
                f"{self.directory / 'config.json'}: {key} = {num_blocks}, but the files hold more blocks; copy the model again"
            )
        blocks = tuple(BlockPlan(index, tuple(self._linears(index))) for index in range(num_blocks))
        parts = self._parts()
        counted = (stored for name, stored in self.checkpoint.tensors.items() if name.startswith(parts))
        features = blocks[0].linears[0].shape[1] if self.family.kind == "encoder" else 0
        return ModelPlan(blocks, sum(math.prod(stored.shape) for stored in counted), features)

    def _parts(self) -> tuple[str, ...]:
        """How names of the model's tensors begin; files of an encoder may hold heads for other tasks beside it."""
        family = self.family
        if family.kind == "decoder":
            return ("",)
        return tuple(name for part in (family.embeddings, family.blocks) for name in family.file_names(f"{part}."))

    def stored_name(self, name: str) -> str | None:
        """Name in the files of the model's tensor ``name``; None if they do not hold it."""
        return next((found for found in self.family.file_names(name) if found in self.checkpoint.tensors), None)

    @cached_property
    def num_positions(self) -> int | None:
        """How many tokens the model takes; None of a model without such a limit."""
        positions = self._configured("max_position_embeddings")
        if not isinstance(positions, int) or not self.family.first_position_after_padding:
            return positions if isinstance(positions, int) else None
        pad = self._configured("pad_token_id")
        return positions - (pad + 1) if isinstance(pad, int) else positions

    @property
    def positions_key(self) -> str:
        """What ``num_positions`` is made of."""
        key = "max_position_embeddings"
        return f"{key} less those up to pad_token_id" if self.family.first_position_after_padding else key

    @property
    def num_embeddings(self) -> int | None:
        """For how many tokens the model has embeddings."""
        found = self._configured("vocab_size")
        return found if isinstance(found, int) else None

    def _configured(self, key: str) -> Any:
        """A value of ``config.json``; one that is not written there is transformers' own."""
        if key in self.config:
            return self.config[key]
        from transformers import AutoConfig

        with _explained(str(self.directory / "config.json")):
            return getattr(AutoConfig.from_pretrained(self.directory, local_files_only=True), key, None)

    def _linears(self, index: int) -> list[LinearPlan]:
        linears = []
        for name, module in self.family.linears.items():
            wanted = f"{self.family.blocks}.{index}.{module}.weight"
            parameter = self.stored_name(wanted) or wanted
            stored = self.checkpoint.tensors.get(parameter)
            if stored is None or len(stored.shape) != 2:
                raise Mistake(f"{self.directory}: tensor {parameter} is missing or not a matrix; copy the model again")
            linears.append(LinearPlan(name, parameter, (stored.shape[0], stored.shape[1]), stored.dtype))
        return linears

    def new_skeleton(self, num_labels: int | None = None) -> Any:
        """The model's modules without their weights: parameters on the meta device, buffers real, evaluation mode.

        A decoder comes with its language-model head; an encoder with a head for ``num_labels`` classes, which only tuning
        has a number for. So whoever prunes learns here that an encoder cannot be.

        Raises
        ------
        Mistake
            transformers cannot build a model from ``config.json``, or ``num_labels`` does not go with the family.
        """
        from transformers import AutoConfig

        path = self.directory / "config.json"
        check_labels(self.family, num_labels, str(path))
        with _explained(str(path)):
            config = AutoConfig.from_pretrained(self.directory, local_files_only=True)
        return skeleton_of(config, self.family, num_labels, str(path))

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
    def tokenizer_sha256(self) -> str:
        """Hash of all that token ids depend on: the tokenizer's files, and the versions of the libraries that read them."""
        import tokenizers
        import transformers

        digest = hashlib.sha256(f"{transformers.__version__} {tokenizers.__version__}".encode())
        for path in sorted(self.directory / file for file in (*TOKENIZER_FILES, *TOKENIZER_SETTINGS)):
            if path.exists():
                digest.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
        return digest.hexdigest()

    @cached_property
    def sha256(self) -> str:
        """Hash of the weights and the tokenizer: names, dtypes, shapes and bytes, however they are sharded."""
        digest = hashlib.sha256()
        for name in beats(sorted(self.checkpoint.tensors), "hashing tensor"):
            stored = self.checkpoint.tensors[name]
            digest.update(json.dumps([name, stored.dtype, list(stored.shape)]).encode())
            for chunk in self.checkpoint.chunks(name):
                digest.update(chunk)
        for file in TOKENIZER_FILES:
            if (path := self.directory / file).exists():
                digest.update(file.encode() + hashlib.sha256(path.read_bytes()).digest())
        return digest.hexdigest()


def check_labels(family: Family, num_labels: int | None, where: str) -> None:
    """Refuse an encoder without a number of labels, and a decoder with one.

    Raises
    ------
    Mistake
        What is asked for does not go with the family.
    """
    if family.kind == "encoder" and num_labels is None:
        raise Mistake(
            f"{where}: model_type is of the family {family.name}, an encoder; encoders can be tuned for classification, "
            "not pruned: name a decoder such as LLaMA, or a method that tunes"
        )
    if family.kind == "decoder" and num_labels is not None:
        raise Mistake(
            f"{where}: model_type is of the family {family.name}, a decoder; decoders are tuned as language models, "
            "not for classification: name an encoder such as RoBERTa"
        )
    if num_labels is not None and num_labels < 2:
        raise Mistake(f"number of labels = {num_labels}: classification needs at least two")


def skeleton_of(config: "PretrainedConfig", family: Family, num_labels: int | None, where: str) -> Any:
    """A model as ``OpenedModel.new_skeleton`` gives it, from a configuration alone; tied parameters are one parameter."""
    import torch
    import transformers
    from accelerate import init_empty_weights

    with _explained(where):
        if num_labels is not None:
            config.num_labels = num_labels
        with init_empty_weights(include_buffers=False):
            skeleton = getattr(transformers, family.auto_class).from_config(config, dtype=torch.float32)
        skeleton.tie_weights()
    return skeleton.eval()


@contextmanager
def _explained(where: str) -> Iterator[None]:
    """Turn what transformers raises when it builds a model into a mistake that names the file."""
    try:
        yield
    except Exception as error:
        text = str(error).splitlines() or [""]
        raise Mistake(f"{where}: transformers cannot build this model: {type(error).__name__}: {text[0]}") from error


def open_model(name: str) -> OpenedModel:
    """Open ``demo``, the model that is installed with Espalier, or a directory.

    Raises
    ------
    Mistake
        See ``OpenedModel`` and ``require_model``.
    """
    if name != "demo":
        require_model(name)
        return OpenedModel(at_home(name).absolute())
    try:
        from espalier_assets import DEMO_MODEL
    except ModuleNotFoundError:
        raise Mistake(
            "model = 'demo': espalier_assets is not installed on this machine; install Espalier here (README, 'Set up and run')"
        ) from None
    return OpenedModel(DEMO_MODEL)
