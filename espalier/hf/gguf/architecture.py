"""Architecture of a model in llama.cpp: its name there and the keys that describe its shape.

llama.cpp has one program for each architecture. ``llama`` and ``qwen3`` have one width for all
blocks. ``deci`` (Nemotron) computes the same as ``llama`` and reads the number of heads and the
feed-forward width of each block, so that pruned models with blocks of different widths are files of
that architecture.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from espalier.errors import InputError
from espalier.hf.families import SLICED, STRUCTURED
from espalier.hf.opening.opened_model import OpenedModel
from espalier.models.structure import Sizes, sizes_of

if TYPE_CHECKING:
    from gguf import GGUFWriter

EVEN = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""Architecture by ``model_type`` of a model whose blocks are alike."""
UNEVEN = {"llama": "deci", "mistral": "deci", "qwen2": "deci"}
"""Architecture by ``model_type`` of other models; ``deci`` lacks the norms of heads of Qwen3."""
ROTATES_NEIGHBOURS = ("llama", "deci")
"""Architectures whose rotary embedding pairs neighbouring rows of a head, not its two halves."""
BIASES = {"llama": None, "deci": None, "qwen2": ("attn.q", "attn.k", "attn.v"), "qwen3": ()}
"""Matrices that may have a bias by architecture; None for all."""
ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True)
class Architecture:
    """Architecture of one model in llama.cpp.

    Parameters
    ----------
    name : name in GGUF files, such as ``llama``
    model : the model
    sizes : number of key-value groups and feed-forward channels of each block
    rope : values of ``rope_parameters`` of the configuration
    """

    name: str
    model: OpenedModel
    sizes: tuple[Sizes, ...]
    rope: Mapping[str, Any]

    @property
    def rotates_neighbours(self) -> bool:
        """True if rows of query and key matrices must be reordered for llama.cpp's rotation."""
        return self.name in ROTATES_NEIGHBOURS

    @property
    def context_length(self) -> int:
        """Number of tokens up to which llama.cpp computes what transformers computes.

        These architectures have no sliding windows, so a window ends the context.
        """
        configured = self.model.configured
        window = configured("sliding_window")
        if self.model.configured("use_sliding_window") is False:
            window = None
        positions = self.model.num_positions
        return min(value for value in (positions, window) if isinstance(value, int))

    def heads(self, index: int, linear: str) -> int:
        """Return the number of heads of the query or key matrix of a block."""
        groups = self.sizes[index].groups
        return groups * self.model.plan.heads_per_group if linear == "attn.q" else groups

    def describe(self, writer: "GGUFWriter") -> None:
        """Add the keys of the model's shape to a file."""
        plan = self.model.plan
        configured = self.model.configured
        heads = [self.heads(index, "attn.q") for index in range(len(self.sizes))]
        groups = [sizes.groups for sizes in self.sizes]
        channels = [sizes.channels for sizes in self.sizes]
        uneven = self.name == "deci"
        writer.add_block_count(len(self.sizes))
        writer.add_context_length(self.context_length)
        writer.add_embedding_length(configured("hidden_size"))
        writer.add_vocab_size(configured("vocab_size"))
        # An architecture for uneven blocks has a list of numbers, one per block.
        writer.add_head_count(heads if uneven else heads[0])
        writer.add_head_count_kv(groups if uneven else groups[0])
        writer.add_feed_forward_length(channels if uneven else channels[0])
        writer.add_key_length(plan.head_dim)
        writer.add_value_length(plan.head_dim)
        writer.add_rope_dimension_count(plan.head_dim)
        writer.add_layer_norm_rms_eps(configured("rms_norm_eps"))
        writer.add_rope_freq_base(float(self.rope["rope_theta"]))
        if self.rope.get("rope_type") == "linear":
            from gguf import RopeScalingType

            writer.add_rope_scaling_type(RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(float(self.rope["factor"]))


def architecture_of(model: OpenedModel) -> Architecture:
    """Return the architecture of a model.

    Raises InputError if llama.cpp has no architecture that computes what the model computes.
    """
    where = f"{model.directory}"
    _require_no_own_code(model, where)
    kind = str(model.config["model_type"]).removeprefix(STRUCTURED)
    if kind not in EVEN:
        raise InputError(
            f"{where}: model_type = {kind!r}: GGUF files can be written of {', '.join(EVEN)}; use"
            " convert_hf_to_gguf.py of llama.cpp for other models that transformers loads without"
            " remote code"
        )
    if (activation := model.configured("hidden_act")) != "silu":
        raise InputError(f"{where}: hidden_act = {activation!r}: llama.cpp computes silu here")
    sizes = tuple(sizes_of(model.plan, block) for block in model.plan.blocks)
    name = EVEN[kind]
    # A model with equal blocks can still need ``deci``, for its biases or its number of heads.
    if len(set(sizes)) > 1 or not (_may_have_biases(model, name) and _fits(model, name, sizes[0])):
        if kind not in UNEVEN:
            raise InputError(
                f"{where}: model_type = {kind!r}: its blocks differ in width or have additional"
                " biases, for which llama.cpp has no architecture with norms of heads; use"
                " transformers, or prune with pruning.selection = 'kind' and"
                " flap.bias-compensation = false"
            )
        name = UNEVEN[kind]
    return Architecture(name, model, sizes, _rope_of(model, where))


def _require_no_own_code(model: OpenedModel, where: str) -> None:
    """Refuse models whose residual stream is not that of their family."""
    remedy = "use transformers, or vLLM with --model-impl transformers"
    if str(model.config["model_type"]).startswith(SLICED):
        raise InputError(
            f"{where}: its residual stream is sliced (SliceGPT), and llama.cpp has no blocks with"
            f" matrices in the residual connections; {remedy}"
        )
    if model.structure is not None and model.structure.cuts_residual:
        raise InputError(
            f"{where}: its blocks read and write parts of the residual stream (SFT-P), which no"
            f" architecture of llama.cpp does; {remedy}"
        )
    if model.family.kind != "decoder":
        raise InputError(f"{where}: is an encoder, and GGUF files are written only of decoders")


def _fits(model: OpenedModel, name: str, sizes: Sizes) -> bool:
    """Return whether an architecture has heads of this number and width.

    ``qwen2`` needs heads that are together as wide as the residual stream.
    """
    heads = sizes.groups * model.plan.heads_per_group
    return name != "qwen2" or heads * model.plan.head_dim == model.configured("hidden_size")


def _may_have_biases(model: OpenedModel, name: str) -> bool:
    allowed = BIASES[name]
    if allowed is None:
        return True
    return all(linear.name in allowed for linear in model.plan.linears if linear.bias)


def _rope_of(model: OpenedModel, where: str) -> Mapping[str, Any]:
    rope = dict(model.configured("rope_parameters") or {})
    kind = rope.get("rope_type", "default")
    partial = rope.get("partial_rotary_factor", 1.0)
    if kind not in ROPE_TYPES or partial != 1.0 or "rope_theta" not in rope:
        raise InputError(
            f"{where}: rope_parameters = {rope}: GGUF files can be written with rope_type"
            f" {', '.join(ROPE_TYPES)} of whole heads; use convert_hf_to_gguf.py of llama.cpp if"
            " transformers loads the model without remote code"
        )
    return rope
