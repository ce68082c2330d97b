"""Block-by-block forward pass of a model: only one block's weights are in memory at a time.

The model's own code runs, never a copy. Its blocks are replaced by relays. A first pass through the
embeddings and the relays records what the model passes to each block in addition to the hidden
states (rotary embeddings, masks). A last pass hands the final hidden states to the model's own
final norm and head.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from espalier.errors import EspalierError, InputError
from espalier.hf.files.checkpoint import ReadingAhead
from espalier.hf.files.tensor_names import missing_tensor, wrong_shape
from espalier.hf.machine.computing import Computing
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.stream.edits import Edits, WeightEdit, dense
from espalier.hf.stream.hidden_states import HiddenStates, hidden_states, memory_of
from espalier.progress import report_each

LOGITS_AT_ONCE = 1 << 24
"""Maximum number of logits per piece: 64 MiB in float32, or 524 tokens for a vocabulary of 32000.

Smaller matrix products in the head may round differently.
"""


def tokens_at_once(vocabulary: int) -> int:
    """Return the number of tokens per piece of logits."""
    return max(1, LOGITS_AT_ONCE // vocabulary)


def head_logits(model: Any, hidden: Tensor) -> Tensor:
    """Return the logits of a language model's head, (..., vocab_size), as its own code does."""
    logits: Tensor = model.get_output_embeddings()(hidden)
    # Granite divides the logits, and Gemma 2 caps them.
    if (scaling := getattr(model.config, "logits_scaling", None)) is not None:
        logits = logits / scaling
    if (cap := getattr(model.config, "final_logit_softcapping", None)) is not None:
        logits = torch.tanh(logits / cap) * cap
    return logits


@torch.no_grad()
def logits_at(
    model: Any, input_ids: Tensor, attention_mask: Tensor | None, places: Tensor
) -> Iterator[Tensor]:
    """Yield the logits of a whole language model at some positions of its input.

    The model's own forward pass runs with an empty input for its head. Then the head is called with
    the hidden states of the requested positions only. The pieces are (tokens, vocab_size), with up
    to ``tokens_at_once`` tokens: the positions of the first row, then those of the next.

    Parameters
    ----------
    model : Hugging Face model with a language-model head, in evaluation mode
    input_ids, attention_mask : (B, T), int64, on the model's device; the mask is None if no token
        is padding
    places : (B, T), bool, the positions
    """
    head = model.get_output_embeddings()
    inputs_of_head: list[Tensor] = []

    # The hook sees what the model passes to its head.
    def take(_: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        inputs_of_head.append(inputs[0][places])
        # With an empty input, the head computes no logits in the full forward pass.
        return (inputs[0][:, :0], *inputs[1:])

    hook = head.register_forward_pre_hook(take)
    try:
        model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
    finally:
        hook.remove()
    # One call of the head, so one input.
    (hidden,) = inputs_of_head
    for piece in hidden.split(tokens_at_once(head.out_features)):
        yield head_logits(model, piece)


TOKENS_PER_BATCH = 2048
"""Maximum number of tokens that pass through a block together; at least one sequence.

The intermediate results of a block are many times as large as the hidden states, and must not grow
with the number of sequences. Sequences of 256 tokens therefore pass 8 at a time, and sequences of
2048 tokens one by one. Another batch size may change results by rounding, but sequences of one
length are always batched in the same way.
"""

FLOAT16_REMEDY = "set dtype to 'bfloat16' or 'float32'"

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and named arguments that a model passes to a block, besides the hidden states."""


class _Relay(nn.Module):
    """Stand-in for a block: records the call and returns ``answer`` or else the hidden states."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        # Not a submodule: the relay must not own the block's parameters.
        self.__dict__["block"] = block
        self.call: Call = ((), {})
        self.received: Tensor | None = None
        self.answer: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # Some models read attributes of their blocks, such as the kind of attention.
            return getattr(self.__dict__["block"], name)

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.received = hidden
        self.call = (args, kwargs)
        return hidden if self.answer is None else self.answer


class Activations:
    """Hidden states of all samples between two blocks, with the arguments of each block."""

    def __init__(self, input_ids: list[Tensor], hidden: HiddenStates, calls: list[list[Call]]):
        self.input_ids = input_ids
        self.hidden = hidden
        self._calls = calls

    @property
    def num_samples(self) -> int:
        """Number of samples."""
        return sum(len(batch) for batch in self.input_ids)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all samples."""
        return sum(batch.numel() for batch in self.input_ids)

    def through(self, index: int, block: nn.Module, *, keep: bool = True) -> None:
        """Run every batch through a block; with ``keep`` the output replaces the hidden states."""
        for batch, calls in enumerate(self._calls):
            args, kwargs = calls[index]
            output = block(self.hidden[batch], *args, **kwargs)
            if keep:
                self.hidden[batch] = output[0] if isinstance(output, tuple) else output
            # Free the output before the next batch is computed.
            del output

    def copied(self) -> "Activations":
        """Return a copy of the hidden states that stays unchanged while these proceed."""
        kept = hidden_states(self.hidden.folder)
        for batch in self.batches():
            kept.append(batch.clone())
        return Activations(self.input_ids, kept, self._calls)

    def batches(self) -> Iterator[Tensor]:
        """Yield the hidden states batch by batch."""
        for batch in range(len(self.hidden)):
            yield self.hidden[batch]

    def of_samples(self, numbers: Sequence[int]) -> Tensor:
        """Return the hidden states of some samples: (samples, sequence_length, hidden_size)."""
        batch_size = samples_per_batch(self.input_ids[0].shape[1])
        rows = list[Tensor]()
        # Hidden states on disk are read one whole batch at a time.
        for batch_index, batch_numbers in groupby(numbers, key=lambda number: number // batch_size):
            batch = self.hidden[batch_index]
            rows += [batch[number % batch_size] for number in batch_numbers]
        return torch.stack(rows)

    def call(self, index: int) -> Call:
        """Return the arguments that the model passes to a block with the first batch."""
        return self._calls[0][index]

    def pieces(self) -> Iterator[memoryview]:
        """Yield the bytes of all hidden states, batch by batch."""
        for batch in self.batches():
            yield memory_of(batch.cpu())


class BlockStream:
    """Causal language model whose blocks are loaded one at a time.

    Raises InputError if the checkpoint lacks a tensor of the model, or holds it in another shape.
    """

    def __init__(self, model: OpenedModel, computing: Computing) -> None:
        self.model = model
        self.computing = computing
        # On a CPU the reading thread would compete with the computation for time and memory.
        on_cuda = computing.device.type == "cuda"
        self._ahead = ReadingAhead(model.checkpoint, pinned=True) if on_cuda else None
        self._skeleton = model.new_skeleton()
        computing.choose_attention(self._skeleton)
        modules = self._skeleton.get_submodule(model.family.blocks)
        self._blocks: list[nn.Module] = list(modules)
        # Relays take the place of the blocks, so that the model's own code runs around them.
        self._relays = [_Relay(block) for block in self._blocks]
        for index, relay in enumerate(self._relays):
            modules[index] = relay
        self._decoder = model.family.blocks.rpartition(".")[0]
        # Fail now, not in the middle of a run.
        self._require_tensors(self._skeleton, "")
        for index, block in enumerate(self._blocks):
            self._require_tensors(block, f"{model.family.blocks}.{index}.")
        # Only buffers stay in memory; weights are read when they are needed.
        drop_weights(self._skeleton)

    @contextmanager
    def block(
        self,
        index: int,
        edits: Mapping[str, WeightEdit] | None = None,
        following: int | None = None,
    ) -> Iterator[nn.Module]:
        """Load one block on the device, in the compute dtype, and drop its weights on exit.

        ``edits`` change its weights, by canonical linear name. On a CUDA device the block with the
        index ``following`` is read while this one computes; errors are raised when it is loaded.
        """
        block = self._blocks[index]
        weights = {
            f"{self.model.family.linears[name]}.weight": edit
            for name, edit in (edits or {}).items()
        }
        self._load(block, f"{self.model.family.blocks}.{index}.", weights)
        # Buffers are moved here; ``_load`` has put the weights on the device.
        block.to(self.computing.device)
        # Reading of the next block overlaps with the computation of this one.
        if self._ahead is not None and following is not None and following < len(self._blocks):
            self._ahead.begin(
                self._stored(self._blocks[following], f"{self.model.family.blocks}.{following}.")
            )
        try:
            yield block
        finally:
            block.to("meta")

    def linears(self, index: int, block: nn.Module) -> dict[str, nn.Linear]:
        """Return the prunable linears of a block by canonical name."""
        return {name: block.get_submodule(path) for name, path in self.model.family.linears.items()}  # type: ignore[misc]

    @torch.no_grad()
    def start(self, samples: Tensor) -> Activations:
        """Return the embeddings of token sequences, (num_samples, sequence_length), int64."""
        batches = list(samples.to(self.computing.device).split(samples_per_batch(samples.shape[1])))
        hidden = hidden_states(self.computing.activations_folder)
        calls = list[list[Call]]()
        with self._loaded(self._decoder) as decoder:
            for batch in batches:
                # Embeddings and relays only: no block computes.
                decoder(input_ids=batch, use_cache=False)
                first = self._relays[0].received
                assert first is not None
                hidden.append(first)
                batch_calls = [relay.call for relay in self._relays]
                # Most models pass equal arguments with every batch; they are stored once.
                calls.append(calls[-1] if calls and _alike(calls[-1], batch_calls) else batch_calls)
                for relay in self._relays:
                    # Do not keep the batch in memory until the next one.
                    relay.received = None
                    relay.call = ((), {})
        return Activations(batches, hidden, calls)

    def resume(self, samples: Tensor, kept: BinaryIO) -> Activations:
        """Restore the activations of the same samples from bytes of ``Activations.pieces``.

        Raises InputError if the number of bytes in the file ``kept`` does not match these samples.
        """
        # This records the calls. The hidden states are overwritten below.
        activations = self.start(samples)
        for batch in range(len(activations.hidden)):
            hidden = torch.empty_like(activations.hidden[batch], device="cpu")
            if kept.readinto(memory_of(hidden)) != hidden.nbytes:  # type: ignore[attr-defined]
                raise _wrong_size("short")
            activations.hidden[batch] = hidden.to(self.computing.device)
        # Bytes that remain belong to other samples.
        if kept.read(1):
            raise _wrong_size("long")
        return activations

    @contextmanager
    def final_norm(self) -> Iterator[nn.Module]:
        """Load the norm after the last block.

        Yields the identity for a model that has no such norm, such as OPT-350M.
        """
        path = self.model.family.final_norm
        parent, _, name = path.rpartition(".")
        if not path or getattr(self._skeleton.get_submodule(parent), name) is None:
            yield nn.Identity()
            return
        with self._loaded(path) as norm:
            yield norm

    @torch.no_grad()
    def logits(self, activations: Activations) -> Iterator[Tensor]:
        """Yield the logits of the hidden states after the last block, sample after sample.

        The pieces are (tokens, vocab_size), with up to ``tokens_at_once`` tokens.
        """
        last = self._relays[-1]
        # The embeddings may be large; only a tied head needs them.
        with self._without_unused_embeddings() as width, self._loaded("") as skeleton:
            at_once = tokens_at_once(skeleton.config.vocab_size)
            try:
                for batch in range(len(activations.hidden)):
                    # Norm and head work on single tokens, so each token becomes a sequence.
                    for piece in activations.hidden[batch].flatten(0, 1)[:, None].split(at_once):
                        last.answer = piece
                        # The model requires embeddings, but the last relay ignores its input.
                        embedded = piece.new_zeros(1).expand(len(piece), 1, width)
                        yield skeleton(inputs_embeds=embedded, use_cache=False).logits.squeeze(1)
            finally:
                last.answer = None

    @contextmanager
    def _without_unused_embeddings(self) -> Iterator[int]:
        """Remove the embeddings unless the head is tied to them; yields their width."""
        path = self.model.family.embeddings
        embeddings: Any = self._skeleton.get_submodule(path)
        tied = getattr(self._skeleton, "all_tied_weights_keys", {}) or {}
        if not tied:
            self._skeleton.set_submodule(path, nn.Identity())
        try:
            yield embeddings.embedding_dim
        finally:
            self._skeleton.set_submodule(path, embeddings)

    @contextmanager
    def _loaded(self, path: str) -> Iterator[Any]:
        """Load embeddings, a norm, the head or all of these, and drop their weights on exit."""
        module = self._skeleton.get_submodule(path)
        self._load(module, f"{path}." if path else "", {})
        if not path:
            module.tie_weights()
        try:
            yield module.to(self.computing.device)
        finally:
            drop_weights(module)

    def _load(self, module: nn.Module, prefix: str, edits: Mapping[str, WeightEdit]) -> None:
        """Assign the checkpoint's values to a module; it may lack tied parameters."""
        values: dict[str, Tensor] = {}
        for full_name in self._stored(module, prefix):
            name = full_name.removeprefix(prefix)
            value = (
                self._ahead.take(full_name)
                if self._ahead is not None
                else self.model.checkpoint.read(full_name)
            )
            value = edits[name](value) if name in edits else value
            # The cast happens on the device, because the transfer is smaller in the stored dtype.
            value = value.to(self.computing.device, non_blocking=True)
            values[name] = value.to(self.computing.dtype) if value.is_floating_point() else value
        # Tied parameters are missing here, and are tied afterwards.
        module.load_state_dict(values, strict=False, assign=True)

    def _stored(self, module: nn.Module, prefix: str) -> list[str]:
        """Return the names of the checkpoint's tensors that belong to a module."""
        return [
            prefix + name
            for name in module.state_dict()
            if prefix + name in self.model.checkpoint.tensors
        ]

    def _require_tensors(self, module: nn.Module, prefix: str) -> None:
        """Raise InputError if the files lack a tensor of a module or hold it in another shape."""
        stored = self.model.checkpoint.tensors
        tied = set(getattr(self._skeleton, "all_tied_weights_keys", {}) or {})
        for name, parameter in module.state_dict().items():
            if (stored_tensor := stored.get(prefix + name)) is None:
                if prefix + name not in tied:
                    raise missing_tensor(self.model, prefix + name)
            elif stored_tensor.shape != tuple(parameter.shape):
                raise wrong_shape(self.model, prefix + name, tuple(parameter.shape))


def _wrong_size(what: str) -> InputError:
    return InputError(
        f"the stored hidden states are too {what}; remove this client's private state and start"
        " again"
    )


def not_finite(stream: BlockStream, what: str) -> EspalierError:
    """Return the error for numbers that are not finite; ``what`` is, say, ``block 1 gives``."""
    where = stream.model.directory
    if stream.computing.dtype == torch.float16:
        return InputError(
            f"dtype = 'float16': {what} NaN or numbers beyond 65504 in {where}, where float16"
            f" overflows to infinity; {FLOAT16_REMEDY}"
        )
    wider = "" if stream.computing.dtype == torch.float32 else "set dtype to 'float32', or "
    return InputError(
        f"{where}: {what} NaN or infinite numbers, so no result can be computed; {wider}check"
        " whether the model is damaged"
    )


def samples_per_batch(tokens: int) -> int:
    """Return the number of samples of a given length per batch; see ``TOKENS_PER_BATCH``."""
    return max(1, TOKENS_PER_BATCH // tokens)


def _alike(a: Any, b: Any) -> bool:
    """Return whether two arguments are equal; tensors are compared by value."""
    if isinstance(a, Tensor):
        same = isinstance(b, Tensor) and a.shape == b.shape and a.dtype == b.dtype
        return same and torch.equal(a, b)
    if type(a) is not type(b):
        return False
    # Containers may hold tensors, which ``==`` would compare element by element.
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_alike(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_alike, a, b))
    return a is b or (isinstance(a, (bool, int, float, str)) and a == b)


def drop_weights(module: nn.Module) -> None:
    """Move all parameters to the meta device, which frees their memory; buffers stay."""
    for submodule in module.modules():
        for name, parameter in submodule.named_parameters(recurse=False):
            setattr(
                submodule, name, nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
            )


@torch.no_grad()
def apply_prune_masks(linears: dict[str, nn.Linear], prune_masks: dict[str, Tensor]) -> None:
    """Set the masked weights of a loaded block to zero; masks are bool, by canonical name."""
    for name, prune_mask in prune_masks.items():
        weight = linears[name].weight
        weight.masked_fill_(prune_mask.to(weight.device), 0)


@torch.no_grad()
def run_through(stream: BlockStream, samples: Tensor, edits: Edits = dense) -> Activations:
    """Pass token sequences, (num_samples, sequence_length), through the edited model's blocks.

    ``BlockStream.logits`` computes the logits of the result.
    """
    activations = stream.start(samples)
    for block_plan in report_each(stream.model.plan.blocks, "passing block"):
        with stream.block(block_plan.index, edits(block_plan.index), block_plan.index + 1) as block:
            activations.through(block_plan.index, block)
    return activations
