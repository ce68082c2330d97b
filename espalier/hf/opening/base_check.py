"""Checks of the base model before clients start: equal to plain transformers, and finite.

All tensors are read once, together with the hash by which clients are compared. A few tokens then
go through the model twice: with plain transformers, and block by block. A client whose model has
the same hash as the server's skips these checks.

A model with learned positions raises an index error beyond its last position. A model with rotary
positions silently computes something that it was not trained for.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from espalier.errors import EspalierError, InputError, first_line
from espalier.hf.export.adapter import a_few_tokens
from espalier.hf.export.model import relative_difference, tolerance, whole_logits
from espalier.hf.families import has_own_code
from espalier.hf.machine.computing import DTYPES, Computing
from espalier.hf.opening.config_file import CONFIG, explained
from espalier.hf.opening.disk_model import load_plain
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.stream.block_stream import Activations, BlockStream, not_finite
from espalier.hf.whole.model import load_whole
from espalier.progress import report_each
from espalier.settings.run import RunSettings
from espalier.settings.tables.task import TEXT

TOKENS = 64
"""Maximum number of tokens of each sequence that is compared."""


def require_finite_weights(
    model: OpenedModel, computing: Computing, num_labels: int | None = None
) -> None:
    """Refuse a model with a weight that is NaN or infinite, also after a cast to the compute dtype.

    Tensors that do not belong to the model, which transformers ignores, may hold any value.
    ``num_labels`` is the number of classes of an encoder, and None for a decoder.

    Raises
    ------
    InputError
        A weight is not finite. The message names the tensor.
    """
    names = model.new_skeleton(num_labels).state_dict()
    # Tensors that the files hold in addition have no influence.
    used_names = {model.stored_name(name) for name in names}
    for name, largest in model.magnitudes.items():
        # The scales of an NF4 matrix have the name of the matrix with a suffix.
        if name not in used_names and name.rpartition(".")[0] not in used_names:
            continue
        where = f"{model.stored.tensors[name].shard}: tensor {name}"
        if not math.isfinite(largest):
            value = "NaN (not a number)" if math.isnan(largest) else "an infinite number"
            raise InputError(
                f"{where} contains {value}, so no result can be computed; name a model without"
                " such values"
            )
        # A weight that is finite in the files may overflow in the compute dtype.
        if _overflows(largest, computing.dtype):
            wider_dtypes = [
                repr(key) for key, dtype in DTYPES.items() if not _overflows(largest, dtype)
            ]
            remedy = (
                f"set dtype to {' or '.join(wider_dtypes)}"
                if wider_dtypes
                else "no supported dtype can represent them: name another model"
            )
            raise InputError(
                f"{where} contains numbers up to {largest:.4g}, and dtype ="
                f" {str(computing.dtype).removeprefix('torch.')!r} overflows beyond"
                f" {torch.finfo(computing.dtype).max:.5g}; {remedy}"
            )


def _overflows(magnitude: float, dtype: torch.dtype) -> bool:
    """Return True if a finite number becomes infinite in a dtype."""
    return bool(torch.tensor(magnitude, dtype=torch.float64).to(dtype).isinf())


@torch.no_grad()
def require_same_logits(model: OpenedModel, computing: Computing, samples: Tensor) -> None:
    """Refuse a decoder whose block-by-block logits differ from those of plain transformers.

    Raises InputError if transformers loads other tensors or reads another configuration, or logits
    differ or are not finite.

    Parameters
    ----------
    model : model of a directory, from which nothing was cut
    computing : device and dtype
    samples : (num_sequences, sequence_length), int64; their first ``TOKENS`` tokens are compared
    """
    # A few tokens fit in memory, and the run directory does not exist yet.
    in_memory = replace(computing, activations_folder=None)
    stream = BlockStream(model, in_memory)
    samples = samples[:, :TOKENS]
    require_same_heads(model)
    # Errors of transformers about the configuration get its name.
    with explained(str(model.directory)):
        plain, loading = load_plain(model, computing.dtype, computing.device)
    _require_same_tensors(model, loading)
    with _computable(model):
        logits = list(_finite_logits(stream, samples))
        expected = whole_logits(plain, samples.to(computing.device))
        difference = relative_difference(logits, expected)
    # bitsandbytes computes in its own dtype, so the tolerance is that of bfloat16.
    in_nf4 = model.stored is not model.checkpoint
    if not difference <= tolerance(torch.bfloat16 if in_nf4 else computing.dtype):
        raise InputError(
            f"{model.directory}: read block by block, the model's logits differ from those of"
            f" plain transformers by {difference:.3g} of the largest, so a result would not be"
            " valid for the model that others load; load it with transformers, and write it"
            " again with save_pretrained"
        )


@contextmanager
def _computable(model: OpenedModel) -> Iterator[None]:
    """Let errors of a forward pass, such as those of unsuitable shapes, name the model."""
    try:
        yield
    except (EspalierError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, ValueError) as error:
        raise InputError(
            f"{model.directory}: transformers cannot compute with this model"
            f" ({type(error).__name__}: {first_line(error)}); try it with"
            f" {model.family.auto_class}, and name a model of another shape, or set another dtype"
            " or device"
        ) from None


def require_same_heads(model: OpenedModel) -> None:
    """Raise InputError if numbers of blocks or heads differ from transformers' configuration."""
    # Blocks of a pruned model have no common number of heads.
    if has_own_code(model.config):
        return
    family = model.family
    plan = model.plan
    # The files decide: attn.o reads all heads.
    heads = plan.blocks[0].linear("attn.o").shape[1] // plan.head_dim
    groups = heads // plan.heads_per_group
    expected = {
        family.num_blocks_key: len(plan.blocks),
        family.query_heads_key: heads,
        **({family.kv_heads_key: groups} if family.kv_heads_key else {}),
    }
    for key, value in expected.items():
        if (configured := model.configured(key)) != value:
            raise InputError(
                f"{model.directory / CONFIG}: {key} is {configured!r} for transformers, but {value}"
                f" according to the tensors in the files; write {value} if the model was trained"
                " so"
            )


def _require_same_tensors(model: OpenedModel, loading: dict[str, set[str]]) -> None:
    """Raise InputError if transformers makes up a tensor, or ignores one that the plan counts."""
    # A tensor that transformers makes up would be random.
    if missing := sorted(loading.get("missing_keys", ())):
        raise InputError(
            f"{model.directory}: transformers finds no tensor for {', '.join(missing[:3])} and"
            " would initialise it randomly; name a model whose files and config.json belong"
            " together"
        )
    biases = {linear.bias_parameter for linear in model.plan.linears if linear.bias}
    # A bias that is counted but ignored would change the result.
    if ignored := sorted(biases & set(loading.get("unexpected_keys", ()))):
        raise InputError(
            f"{model.directory}: the files contain {ignored[0]}, but config.json gives the model"
            " no such bias, and transformers would leave it out; set attention_bias or mlp_bias"
            " as in training, or remove these tensors"
        )


def _finite_logits(stream: BlockStream, samples: Tensor) -> Iterator[Tensor]:
    """Yield logits in pieces of tokens, and check that the output of each block is finite."""
    activations = stream.start(samples)
    _require_finite(stream, activations, "the embeddings give")
    for block in report_each(stream.model.plan.blocks, "checking block"):
        with stream.block(block.index, None, block.index + 1) as module:
            activations.through(block.index, module)
        _require_finite(stream, activations, f"block {block.index} gives")
    # The head is applied piece by piece; a vocabulary of logits for all tokens is large.
    for piece in stream.logits(activations):
        if not bool(piece.isfinite().all()):
            raise not_finite(stream, "the head gives")
        yield piece


def _require_finite(stream: BlockStream, activations: Activations, what: str) -> None:
    if not all(bool(batch.isfinite().all()) for batch in activations.batches()):
        raise not_finite(stream, what)


@torch.no_grad()
def require_same_encoder(model: OpenedModel, computing: Computing, num_labels: int) -> None:
    """Refuse an encoder whose hidden states differ from those of plain transformers.

    The encoder is loaded as for training. Raises InputError if transformers finds other tensors, or
    hidden states differ or are not finite.
    """
    tokens = a_few_tokens(model).to(computing.device)
    loaded = load_whole(model, computing, "float32", num_labels=num_labels)
    plain, loading = load_plain(
        model, torch.float32, torch.device("cpu"), num_labels, in_memory=True
    )
    heads = tuple(f"{path}." for path in model.family.head_linears.values())
    # Missing tensors of a new head are expected.
    loading["missing_keys"] = {
        name for name in loading["missing_keys"] if not name.startswith(heads)
    }
    _require_same_tensors(model, loading)
    base = model.family.base
    states, plain_states = (
        getattr(encoder.to(computing.device).eval(), base)(input_ids=tokens).last_hidden_state
        for encoder in (loaded, plain)
    )
    difference = relative_difference([states], [plain_states])
    if not difference <= tolerance(torch.float32):
        raise InputError(
            f"{model.directory}: the encoder's hidden states differ from those of plain"
            f" transformers by {difference:.3g} of the largest, or are not finite; load it with"
            " transformers, and write it again with save_pretrained"
        )


def require_within_limits(settings: RunSettings, model: OpenedModel) -> None:
    """Refuse a run whose sequences or tokenizer exceed the limits of the model.

    Raises
    ------
    InputError
        One line for each setting that is too large, and one line if the tokenizer has too many
        tokens.
    """
    lines = beyond_positions(settings, model)
    tokens = model.num_tokens
    embeddings = model.num_embeddings
    if embeddings is not None and tokens > embeddings:
        lines.append(
            f"{model.directory}: its tokenizer has token ids up to {tokens - 1}, but the model"
            f" has {embeddings} embeddings (vocab_size in its config.json); replace the"
            " tokenizer by the one with which the model was trained"
        )
    if lines:
        raise InputError("\n".join(lines))


def beyond_positions(settings: RunSettings, model: OpenedModel) -> list[str]:
    """Return an error line for each sequence length that exceeds the positions of the model."""
    positions = model.num_positions
    return [
        f"{key} = {tokens}: the model has {positions} positions ({model.positions_key} in its"
        f" config.json); set it to {positions} or less"
        for key, tokens in sequence_lengths(settings, model.family.kind == "encoder").items()
        if positions is not None and tokens > positions
    ]


def sequence_lengths(settings: RunSettings, encoder: bool) -> dict[str, int]:
    """Return the sequence lengths that a run sets, in tokens, by the name of the setting.

    Settings that the run does not use are left out. Encoders do not evaluate on text.
    """
    task = settings.task
    on_items = settings.tunes and task.name != TEXT
    lengths = {}
    if not encoder:
        lengths["evaluation.sequence-length"] = settings.evaluation.sequence_length
        if not on_items:
            lengths["data.sequence-length"] = settings.data.sequence_length
    if on_items:
        lengths["task.max-tokens"] = task.max_tokens
        if task.max_test_tokens:
            lengths["task.max-test-tokens"] = task.max_test_tokens
    return lengths
