"""Opened model directory: configuration, family, tensors, plan, tokenizer and hash.

Opening loads no weights. torch and transformers take a second each to import. Flower starts a
process for every message, and many messages need only the plan. Both libraries are therefore
imported only when a model or a tokenizer is created, or a weight is read.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from espalier.environment.bounded_json import read_json_object
from espalier.environment.hub_models import cached_model, is_on_hub
from espalier.environment.imports import importing
from espalier.environment.paths import at_home, require_model
from espalier.errors import InputError
from espalier.hf.families import PER_LAYER, SLICED, Family, family_of, has_own_code
from espalier.hf.files.checkpoint import FLOATING, INDEX, SINGLE, Checkpoint
from espalier.hf.files.expert_checkpoint import ExpertCheckpoint
from espalier.hf.files.tensor_names import (
    TIED,
    has_other_head,
    missing_tensor,
    with_base_prefix,
)
from espalier.hf.files.unchanged_files import cached_while_unchanged
from espalier.hf.nf4.checkpoint import CONFIG_KEY, QuantisedCheckpoint, is_doubly_quantised
from espalier.hf.opening.config_file import CONFIG, explained, read_config
from espalier.hf.structured.configuration import (
    STRUCTURE_FILE,
    build_config,
    load_config,
    structured_config,
)
from espalier.hf.structured.cut_checkpoint import CutCheckpoint
from espalier.hf.tokenizer.chat import ChatTokens, Message, encode_chat
from espalier.hf.tokenizer.encoded_texts import EncodedTexts
from espalier.hf.tokenizer.files import load_tokenizer, stored_template
from espalier.models.plan import BlockPlan, LinearPlan, ModelPlan
from espalier.models.structure import Structure, sizes_of, structured_plan
from espalier.progress import report_each

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "sentencepiece.bpe.model",
)
TOKENIZER_SETTINGS = (
    "config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
OTHER_FILE = "transformers_weights"
"""Key of ``config.json`` that names another weight file."""
WITHOUT_EFFECT = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
"""Keys of ``config.json`` that do not change what a model in given dtypes computes."""
ANY_LABELS = 2
"""Number of classes of an encoder's skeleton whose head does not matter."""


class OpenedModel:
    """Model directory in Hugging Face layout, or the part of it that a structure keeps.

    Matrices that the files hold in NF4 (``write_quantised``, or transformers with bitsandbytes)
    appear as float32, and ``config`` does not say that they are quantised. ``stored_in_nf4`` finds
    their codes.

    Parameters
    ----------
    directory : model directory; it may hold a pruned model itself
    cut : structure to keep of it; None keeps everything
    given : tensors by name that replace those in the files or are not in the files, in the dtype of
        the files
    scales : factors of a matrix's remaining columns, by name of the matrix: (remaining columns,),
        float32

    Raises
    ------
    InputError
        The directory, a file or a tensor is missing, or the model is of an unsupported kind.
    """

    def __init__(
        self,
        directory: Path,
        cut: Structure | None = None,
        given: "Mapping[str, Tensor] | None" = None,
        scales: "Mapping[str, Tensor] | None" = None,
    ) -> None:
        self.directory = directory
        path = directory / CONFIG
        self.config: dict[str, Any] = read_config(path)
        """Content of ``config.json``, for exports; use ``configured`` to read values."""
        if self.config.get(OTHER_FILE) is not None:
            raise InputError(
                f"{path}: {OTHER_FILE} = {self.config[OTHER_FILE]!r}: weights are read only from"
                f" {SINGLE} or {INDEX}; rename the file, and remove the key"
            )
        self.cut: Structure | None = None
        # All other code sees matrices in float32, and exports must not claim otherwise.
        quantisation = self.config.pop(CONFIG_KEY, None)
        doubly = bool(quantisation) and is_doubly_quantised(quantisation, str(path))
        self.family: Family = family_of(self.config, str(path))
        if quantisation and self.family.experts:
            raise InputError(
                f"{path}: {CONFIG_KEY} is set, and experts in 4 bits cannot be read; name the"
                " model before quantisation"
            )
        # Tensors as the files name them, then as transformers does.
        files = Checkpoint(directory)
        self.is_as_stored = not quantisation
        """True if the configuration and the tensor names are those of the directory.

        Copies of its configuration and index then describe the model.
        """
        self._name_as_loaded(files)
        self.checkpoint: Checkpoint = files
        if self.family.experts:
            self.checkpoint = ExpertCheckpoint(files, self.family)
        elif quantisation:
            self.checkpoint = QuantisedCheckpoint(files, doubly)
        self.plan: ModelPlan = self._make_plan()
        self.structure = self._own_structure()
        """Structure relative to the original, uncut model; None if nothing was cut."""
        # Cut last, so that everything above describes the model in the files.
        if cut is not None:
            self._cut_out(cut, given or {}, scales or {})
            # It was read for the model before the cut.
            vars(self).pop("_transformers_config", None)

    def _name_as_loaded(self, files: Checkpoint) -> None:
        """Rename a decoder's tensors and set the tie in the configuration, as transformers does."""
        if self.family.kind != "decoder":
            # ``stored_name`` handles the names of an encoder.
            return
        stored = files.tensors
        files.tensors = with_base_prefix(self.family, stored, self.directory)
        head = self.family.head_weight
        embedding = self.family.embedding_weight
        value = self.config.get(TIED)
        # The configuration ties head and embedding, and the files hold a head.
        if head in files.tensors and (self.configured(TIED) if value is None else value):
            # Only the head is in the files: it is the embedding, too.
            if embedding not in files.tensors:
                files.tensors = {
                    embedding if name == head else name: tensor
                    for name, tensor in files.tensors.items()
                }
            # Two different matrices are not tied, even if the configuration says so.
            elif has_other_head(self.family, files):
                self.config[TIED] = False
                self.is_as_stored = False
        # Names in another order or with another prefix: the index of the directory does not fit.
        self.is_as_stored &= list(stored) == list(files.tensors)
        # It was read before the tie and ``is_as_stored`` were known.
        vars(self).pop("_transformers_config", None)

    def _own_structure(self) -> Structure | None:
        """Return the structure of a pruned model in the directory; None for other models."""
        path = self.directory / STRUCTURE_FILE
        if str(self.config["model_type"]).startswith(SLICED):
            return None
        # A compact export whose blocks are alike has the configuration of a model of the family.
        if not has_own_code(self.config) and not path.exists():
            return None
        structure = Structure.from_json(read_json_object(path), str(path))
        if [block.sizes for block in structure.blocks] != [
            sizes_of(self.plan, block) for block in self.plan.blocks
        ]:
            raise InputError(
                f"{path}: is the structure of another model than that of the directory; copy"
                " both from one export"
            )
        return structure

    def require_groups(self, *, heads: bool) -> None:
        """Refuse a model from which no prunable groups can be removed.

        Raises
        ------
        InputError
            The residual stream of the model was sliced; or ``heads`` is true, and a norm averages
            over all heads.

        Parameters
        ----------
        heads : whether the method needs attention groups that can be removed
        """
        self._require_unsliced()
        if heads and not self.family.heads_prunable:
            raise InputError(
                f"{self.directory}: model_type = {self.config['model_type']!r}: heads cannot be"
                " removed, because a norm averages over all heads of a block; name a model of"
                " another family, or a method that prunes single weights, channels (flap,"
                " llm-pruner) or blocks"
            )

    def _require_unsliced(self) -> None:
        if str(self.config["model_type"]).startswith(SLICED):
            raise InputError(
                f"{self.directory}: model_type = {self.config['model_type']!r}: groups and blocks"
                " cannot be removed from a model with a sliced residual stream; name the model from"
                " which it was made, or a method that does not prune"
            )

    def _cut_out(
        self, cut: Structure, new_tensors: "Mapping[str, Tensor]", scales: "Mapping[str, Tensor]"
    ) -> None:
        self._require_unsliced()
        plan = self.plan
        self.plan = structured_plan(self.plan, cut)
        self.cut = cut
        self.checkpoint = CutCheckpoint(
            self.checkpoint, self.family, plan, cut, new_tensors, scales
        )
        # A cut of a pruned model, too, is described relative to the original one.
        self.structure = cut if self.structure is None else cut.of(self.structure)
        if self.structure.cuts_residual and not self.family.residual_prunable:
            raise InputError(
                f"{self.directory}: residual dimensions can be removed only in models like"
                " LLaMA, with a norm before attention and feed-forward part; this model is of"
                f" the family {self.family.name}"
            )
        self.config = structured_config(self.config, self.family, self.plan, cut, self.structure)

    def _make_plan(self) -> ModelPlan:
        key = self.family.num_blocks_key
        num_blocks = self._count_of(key)
        beyond = tuple(self.family.file_names(f"{self.family.blocks}.{num_blocks}."))
        # transformers would ignore further blocks silently.
        if any(name.startswith(beyond) for name in self.checkpoint.tensors):
            raise InputError(
                f"{self.directory / CONFIG}: {key} = {num_blocks}, but the files contain more"
                " blocks, which transformers would ignore; set it to the number of blocks in"
                " the files"
            )
        blocks = tuple(
            BlockPlan(index, self._linears(index), tuple(sorted(self._beside_linears(index))))
            for index in range(num_blocks)
        )
        family = self.family
        # In a decoder every tensor counts.
        parts: tuple[str, ...] = ("",)
        if family.kind == "encoder":
            # Files of an encoder may also hold heads for other tasks.
            prefixes = (f"{family.embeddings}.", f"{family.blocks}.")
            parts = tuple(name for prefix in prefixes for name in family.file_names(prefix))
        counted = (
            stored for name, stored in self.checkpoint.tensors.items() if name.startswith(parts)
        )
        # Only encoders have a new head, of this width.
        features = blocks[0].linears[0].shape[1] if self.family.kind == "encoder" else 0
        return ModelPlan(
            blocks,
            sum(math.prod(stored.shape) for stored in counted),
            features,
            *self._heads(blocks[0]),
            self.family.heads_prunable,
        )

    def _heads(self, block: BlockPlan) -> tuple[int, int]:
        """Return the width of an attention head and the number of query heads per group."""
        key = self.family.query_heads_key
        heads = self._first_of(key)
        names = {linear.name for linear in block.linears}
        query, keys = ("attn.q", "attn.k") if "attn.q" in names else ("attn.qkv", "attn.qkv")
        # Heads are not in the files; their width follows from the matrix.
        rows = block.linear(query).shape[0]
        key_rows = block.linear(keys).shape[0]
        # One matrix for query, key and value: attn.o has the width of the query.
        if query == keys:
            rows = block.linear("attn.o").shape[1]
            key_rows = (key_rows - rows) // 2
        head_dim = rows // heads
        # Rows must be whole heads, and query heads whole groups.
        if rows % heads or key_rows % head_dim or heads % (key_rows // head_dim):
            raise InputError(
                f"{self.directory / CONFIG}: {key} = {heads} does not match"
                f" {block.linear(query).parameter}, which has {rows} rows, and"
                f" {block.linear(keys).parameter}, which has {key_rows}; set the key to its"
                " value in training"
            )
        return head_dim, heads // (key_rows // head_dim)

    def _first_of(self, key: str) -> int:
        """Return a number of the first block, which may differ from that of the model."""
        overrides = self.config.get(PER_LAYER)
        for index, override in overrides.items() if isinstance(overrides, dict) else ():
            if (
                isinstance(override, dict)
                and str(index).isdecimal()
                and int(index) == 0
                and key in override
            ):
                return self._positive(override, key)
        return self._count_of(key)

    def _count_of(self, key: str) -> int:
        value = self.config.get(key)
        # transformers takes seconds to import, so it is asked only if the file has no value.
        return self._positive({key: self.configured(key) if value is None else value}, key)

    def _positive(self, values: Mapping[str, Any], key: str) -> int:
        value = values.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InputError(
                f"{self.directory / CONFIG}: {key} = {value!r} must be a positive integer"
            )
        return value

    def _beside_linears(self, index: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the name, canonical if there is one, and the shape of a block's other tensors."""
        linears = set(self.family.linears.values())
        norms = {path: name for name, path in self.family.norms.items()}
        for prefix in self.family.file_names(f"{self.family.blocks}.{index}."):
            for name, stored in self.checkpoint.tensors.items():
                # Biases of linears count as parts of them, norms by canonical name.
                module, _, kind = name.removeprefix(prefix).rpartition(".")
                if name.startswith(prefix) and module not in linears:
                    yield f"{norms.get(module, module)}.{kind}", stored.shape

    def stored_name(self, name: str) -> str | None:
        """Return the name of a model's tensor in the files; None if they do not hold it."""
        return next(
            (
                file_name
                for file_name in self.family.file_names(name)
                if file_name in self.checkpoint.tensors
            ),
            None,
        )

    @cached_property
    def num_positions(self) -> int | None:
        """Maximum number of tokens of a sequence; None if the model has no such limit."""
        positions = self.configured("max_position_embeddings")
        pad = self.configured("pad_token_id")
        if not isinstance(positions, int):
            return None
        # Positions are counted from pad_token_id + 1.
        after_padding = self.family.first_position_after_padding and isinstance(pad, int)
        return positions - (pad + 1) if after_padding else positions

    @property
    def positions_key(self) -> str:
        """Description of the configuration value that ``num_positions`` is made of."""
        if self.family.first_position_after_padding:
            return "max_position_embeddings minus the positions up to pad_token_id"
        return "max_position_embeddings"

    @property
    def num_embeddings(self) -> int | None:
        """Number of tokens that have an embedding; None if the configuration does not say."""
        size = self.configured("vocab_size")
        return size if isinstance(size, int) else None

    def configured(self, key: str) -> Any:
        """Return a configuration value as transformers has it; None if it does not know the key."""
        return getattr(self._transformers_config, key, None)

    @cached_property
    def _transformers_config(self) -> "PretrainedConfig":
        with explained(str(self.directory / CONFIG)):
            # transformers cannot read the configuration of a pruned model from the directory.
            if self.cut is not None or has_own_code(self.config):
                return build_config(self.config)
            config = load_config(self.directory)
            # The modules are built without quantisation, so the configuration must not ask for it.
            vars(config).pop(CONFIG_KEY, None)
            # transformers must not tie two different matrices.
            if not self.is_as_stored and self.config.get(TIED) is False:
                setattr(config, TIED, False)
            return config

    def _linears(self, index: int) -> tuple[LinearPlan, ...]:
        linears = []
        for name in self.family.linears:
            path = self.family.module_path(index, name)
            parameter = self.stored_name(f"{path}.weight") or f"{path}.weight"
            stored = self.checkpoint.tensors.get(parameter)
            if stored is None:
                raise missing_tensor(self, parameter)
            # Only matrices of floating point can be pruned.
            if len(stored.shape) != 2 or stored.dtype not in FLOATING:
                raise InputError(
                    f"{stored.shard}: {parameter} is {stored.dtype} {list(stored.shape)}, but"
                    f" must be a matrix with one of the dtypes {', '.join(FLOATING)}; name the"
                    " model as it was trained"
                )
            bias = self.stored_name(f"{path}.bias") is not None
            linears.append(
                LinearPlan(name, parameter, (stored.shape[0], stored.shape[1]), stored.dtype, bias)
            )
        return tuple(linears)

    def new_skeleton(self, num_labels: int | None = None) -> Any:
        """Return the model's modules without weights: see ``skeleton_of``.

        Only tuning knows a number of classes, so pruning methods refuse encoders here.
        """
        where = str(self.directory / CONFIG)
        check_labels(self.family, num_labels, where)
        return skeleton_of(deepcopy(self._transformers_config), self.family, num_labels, where)

    @cached_property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """Tokenizer of the model; all models of the same files share it within a process."""
        if has_own_code(self.config):
            # This registers the classes of a pruned model with transformers.
            _ = self._transformers_config
        return load_tokenizer(self.directory)

    @property
    def num_tokens(self) -> int:
        """Highest token id of the tokenizer, plus 1."""
        return 1 + max(self.tokenizer.get_vocab().values(), default=-1)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, with the special tokens that the tokenizer adds.

        The results for the last texts are cached, because every round of a run encodes the same
        texts.
        """
        return self._encoded(text)

    def encode_chat(
        self, messages: Sequence[Message], first: int, template: str | None
    ) -> list[ChatTokens]:
        """Return the training sequences of a conversation, see ``tokenizer.chat.encode_chat``."""
        return encode_chat(self.tokenizer, messages, first, template)

    @cached_property
    def _encoded(self) -> EncodedTexts:
        tokenizer = self.tokenizer
        return EncodedTexts(lambda text: tokenizer(text, verbose=False)["input_ids"])

    @cached_property
    def tokenizer_sha256(self) -> str:
        """SHA-256 of the tokenizer's files and of the versions of the libraries that read them."""
        import tokenizers
        import transformers

        # Releases of the libraries may tokenise differently.
        digest = hashlib.sha256(f"{transformers.__version__} {tokenizers.__version__}".encode())
        for path in sorted(
            self.directory / file for file in (*TOKENIZER_FILES, *TOKENIZER_SETTINGS)
        ):
            if path.exists():
                digest.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
        return digest.hexdigest()

    @property
    def has_tokenizer(self) -> bool:
        """True if the directory has a file of a tokenizer."""
        return any((self.directory / name).exists() for name in TOKENIZER_FILES)

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the weights, the tokenizer, its chat template and the configuration.

        It covers names, dtypes, shapes and bytes as they are stored, but not the sharding. For a
        model with a cut it covers the hash of the directory's model, the hash of the structure, the
        given tensors, and the matrices whose columns are scaled.
        """
        if self.cut is None:
            return self._read_through(lambda name, chunk: None)
        assert isinstance(self.checkpoint, CutCheckpoint)
        # Scaled matrices have other bytes than the directory's.
        changed = {name for name, part in self.checkpoint.parts.items() if part.scales is not None}
        digests = {}
        for name in sorted({*self.checkpoint.given, *changed}):
            stored = self.checkpoint.tensors[name]
            digest = hashlib.sha256(json.dumps([stored.dtype, list(stored.shape)]).encode())
            for chunk in self.checkpoint.chunks(name):
                digest.update(chunk)
            digests[name] = digest.hexdigest()
        # Hash of the files, the structure, and what replaces tensors.
        parts = [OpenedModel(self.directory).sha256, self.cut.sha256, digests]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def _read_through(self, see: Callable[[str, bytes], None]) -> str:
        """Return the hash of the directory's files; ``see`` gets each piece of each tensor."""
        digest = hashlib.sha256()
        files = self.stored
        # Sorted, so that the sharding has no effect.
        for name in report_each(sorted(files.tensors), "hashing tensor"):
            stored = files.tensors[name]
            digest.update(json.dumps([name, stored.dtype, list(stored.shape)]).encode())
            for chunk in files.chunks(name):
                digest.update(chunk)
                see(name, chunk)
        for file in TOKENIZER_FILES:
            if (path := self.directory / file).exists():
                digest.update(file.encode() + hashlib.sha256(path.read_bytes()).digest())
        if template := stored_template(self.directory):
            digest.update(json.dumps({"chat_template": template}, sort_keys=True).encode())
        # The text counts, and not transformers' object: its defaults differ between releases.
        document = read_config(self.directory / CONFIG)
        values = {
            name: value
            for name, value in document.items()
            if name not in WITHOUT_EFFECT and not _is_of_code(name)
        }
        digest.update(json.dumps(values, sort_keys=True).encode())
        return digest.hexdigest()

    @property
    def stored(self) -> Checkpoint:
        """Tensors as the files hold them if nothing is cut: NF4 matrices as codes and scales."""
        files = self.checkpoint
        return files.files if isinstance(files, QuantisedCheckpoint) else files

    @cached_property
    def magnitudes(self) -> dict[str, float]:
        """Largest magnitude of each stored floating-point tensor.

        The value is NaN or infinity if a number of the tensor is not finite. The files are read
        once for the magnitudes and the hash.
        """
        import torch

        from espalier.hf.files.dtypes import TORCH_DTYPES

        tensors = self.stored.tensors
        largest = {
            name: torch.zeros((), dtype=TORCH_DTYPES[stored.dtype])
            for name, stored in tensors.items()
            if stored.dtype in FLOATING
        }

        def see(name: str, chunk: bytes) -> None:
            if name in largest:
                # The maximum of pieces is the maximum of the tensor.
                values = torch.frombuffer(bytearray(chunk), dtype=largest[name].dtype)
                # torch's maximum propagates NaN.
                largest[name] = torch.maximum(largest[name], values.abs_().max())

        # Fill the cached property, so that the files are not read again for the hash.
        self.__dict__["sha256"] = self._read_through(see)
        return {name: value.item() for name, value in largest.items()}


def check_labels(family: Family, num_labels: int | None, where: str) -> None:
    """Refuse an encoder without a number of classes, and a decoder with one.

    Raises
    ------
    InputError
        ``num_labels`` does not match the model family.
    """
    if family.kind == "encoder" and num_labels is None:
        raise InputError(
            f"{where}: model_type is of the family {family.name}, an encoder; encoders can be"
            " tuned for classification, but not pruned: name a decoder such as LLaMA, or a"
            " method that tunes"
        )
    if family.kind == "decoder" and num_labels is not None:
        raise InputError(
            f"{where}: model_type is of the family {family.name}, a decoder; decoders are tuned"
            " as language models, not for classification: name an encoder such as RoBERTa"
        )


def skeleton_of(
    config: "PretrainedConfig", family: Family, num_labels: int | None, where: str
) -> Any:
    """Return the modules of a model without weights, in evaluation mode.

    Parameters are on the meta device, and tied ones are one parameter; buffers are real. A decoder
    has its language-model head, and an encoder has a head for ``num_labels`` classes.

    Raises
    ------
    InputError
        transformers cannot build a model from the configuration.
    """
    # Errors while importing are reported as such, not as errors of the model.
    with importing():
        import torch
        import transformers
        from accelerate import init_empty_weights
        from transformers.initialization import no_init_weights

    # importing() again: transformers imports the code of this kind of model here.
    with explained(where), importing():
        forget_named_code(config)
        if num_labels is not None:
            config.num_labels = num_labels
        # Parameters on the meta device take no memory; buffers, such as rotary frequencies, are
        # real.
        with init_empty_weights(include_buffers=False), no_init_weights():
            skeleton = getattr(transformers, family.auto_class).from_config(
                config, dtype=torch.float32
            )
        # Tied parameters become one, as in the loaded model.
        skeleton.tie_weights()
    return skeleton.eval()


def forget_named_code(config: "PretrainedConfig") -> None:
    """Remove named attention code and the like, which transformers would download and run."""
    for name in filter(_is_of_code, list(vars(config))):
        vars(config)[name] = None


def _is_of_code(name: str) -> bool:
    return name.endswith(("implementation", "implementation_internal"))


def open_model(name: str) -> OpenedModel:
    """Open a model by name.

    Parameters
    ----------
    name : ``demo`` for the model that is installed with Espalier, a model directory, the directory
        of a run that wrote a model, or ``owner/name[@revision]`` for one in the hub's cache

    Raises
    ------
    InputError
        See ``OpenedModel``, ``require_model`` and ``cached_model``.
    """
    # A name of the hub is looked up in the cache only.
    if is_on_hub(name):
        return opened_in(cached_model(name))
    if name != "demo":
        require_model(name)
        return opened_in(model_folder(name))
    try:
        from espalier_assets import DEMO_MODEL
    except ModuleNotFoundError:
        raise InputError(
            "model = 'demo': espalier_assets is not installed on this machine; install Espalier"
            " here (README, 'Set up and run')"
        ) from None
    return opened_in(DEMO_MODEL)


def model_folder(name: str) -> Path:
    """Return the directory of a local model: the given one, or the model's in that of a run.

    Raises InputError if the run wrote no model.
    """
    directory = at_home(name).absolute()
    if (directory / CONFIG).exists() or not (directory / "run.json").exists():
        return directory
    if not (directory / "model" / CONFIG).exists():
        raise InputError(
            f"{directory}: the run wrote no model/; take another run, or write the adapter or a"
            f" client's model as a model: espalier export {directory} --to transformers --out DIR"
        )
    return directory / "model"


@cached_while_unchanged(4)
def opened_in(directory: Path) -> OpenedModel:
    """Open the model of a directory; InputError as for ``OpenedModel``.

    Within a process, callers share the same model and its hash as long as the files do not change.
    """
    return OpenedModel(directory)
