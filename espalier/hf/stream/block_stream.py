"""Walk a model block by block: only one block's weights and the windows' activations are in memory.

The model's own code runs, never a copy of it. Its blocks are replaced by relays: a first pass through embeddings and
relays records what the model passes to each block beside the hidden states (rotary embeddings, masks); a last pass
hands the finished hidden states to the model's own final norm and head.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from espalier.errors import Mistake
from espalier.hf.files.reading_ahead import ReadingAhead
from espalier.hf.files.tensor_faults import missing_tensor, wrong_shape
from espalier.hf.machine.computing import Computing
from espalier.hf.opening.opened import OpenedModel
from espalier.hf.stream.edits import Edits, WeightEdit, dense
from espalier.hf.stream.hidden_states import HiddenStates, hidden_states, memory_of
from espalier.hf.stream.logits import tokens_at_once
from espalier.models.plan import LinearPlan
from espalier.progress.beats import beats

TOKENS_PER_BATCH = 2048
"""Tokens that pass through a block together, whatever the length of their windows; one window at least.

What a block computes from a batch is many times as large as the hidden states, and must not grow with the windows. So windows
of 256 tokens pass 8 at a time, of 2048 one by one. Another batch may change results by rounding; windows of one length are
always batched alike.
"""

FLOAT16_REMEDY = "set dtype to 'bfloat16' or 'float32'"

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""What a model passes to a block beside the hidden states: positional and named arguments."""


class _Relay(nn.Module):
    """Stands where a block stood: records the call, and returns the hidden states it was given or told to give."""

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
            return getattr(self.__dict__["block"], name)

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.received = hidden
        self.call = (args, kwargs)
        return hidden if self.answer is None else self.answer


class Activations:
    """Hidden states of all windows between two blocks, in batches, and what the model passes to each block with them."""

    def __init__(self, input_ids: list[Tensor], hidden: HiddenStates, calls: list[list[Call]]):
        self.input_ids = input_ids
        self.hidden = hidden
        self._calls = calls

    @property
    def num_windows(self) -> int:
        """How many windows there are."""
        return sum(len(batch) for batch in self.input_ids)

    def through(self, index: int, block: nn.Module, *, keep: bool = True) -> None:
        """Run every batch through a block; with ``keep`` its output replaces the hidden states, in their place."""
        for batch, calls in enumerate(self._calls):
            args, kwargs = calls[index]
            output = block(self.hidden[batch], *args, **kwargs)
            if keep:
                self.hidden[batch] = output[0] if isinstance(output, tuple) else output
            del output  # not held while the next batch is computed

    def copied(self) -> "Activations":
        """The same hidden states, to be kept while these go on."""
        kept = self.hidden.emptied()
        for batch in self.batches():
            kept.append(batch.clone())
        return Activations(self.input_ids, kept, self._calls)

    def batches(self) -> Iterator[Tensor]:
        """The hidden states, batch after batch."""
        for batch in range(len(self.hidden)):
            yield self.hidden[batch]

    def of_windows(self, numbers: Sequence[int]) -> Tensor:
        """The hidden states of some windows, in the order of ``numbers``, (windows, tokens, width); a batch is read once."""
        at_once = windows_per_batch(self.input_ids[0].shape[1])
        rows = list[Tensor]()
        # On disk a batch is read whole.
        for place, own in groupby(numbers, key=lambda number: number // at_once):
            batch = self.hidden[place]
            rows += [batch[number % at_once] for number in own]
        return torch.stack(rows)

    def call(self, index: int) -> Call:
        """What the model passes to a block with the first batch, beside the hidden states."""
        return self._calls[0][index]

    def pieces(self) -> Iterator[memoryview]:
        """The bytes of all hidden states, batch after batch."""
        for batch in self.batches():
            yield memory_of(batch.cpu())


class BlockStream:
    """A causal language model whose blocks are loaded one at a time."""

    def __init__(self, model: OpenedModel, computing: Computing) -> None:
        self.model = model
        self.computing = computing
        # On a CPU the thread would take time and memory from the computation.
        on_cuda = computing.device.type == "cuda"
        self._ahead = ReadingAhead(model.checkpoint, pinned=True) if on_cuda else None
        self._skeleton = model.new_skeleton()
        modules = self._skeleton.get_submodule(model.family.blocks)
        self._blocks: list[nn.Module] = list(modules)
        self._relays = [_Relay(block) for block in self._blocks]
        for index, relay in enumerate(self._relays):
            modules[index] = relay
        self._decoder = model.family.blocks.rpartition(".")[0]
        self._require_tensors(self._skeleton, "")
        for index, block in enumerate(self._blocks):
            self._require_tensors(block, f"{model.family.blocks}.{index}.")
        drop_weights(self._skeleton)

    @contextmanager
    def block(
        self,
        index: int,
        edits: Mapping[str, WeightEdit] | None = None,
        following: int | None = None,
    ) -> Iterator[nn.Module]:
        """Load one block's weights, edited, in the computing dtype and on its device; they are dropped on leaving.

        ``following`` is the block that will be asked for next: on a CUDA device it is read while this one computes. What cannot
        be read of it is told when it is asked for.
        """
        block = self._blocks[index]
        weights = {
            f"{self.model.family.linears[name]}.weight": edit
            for name, edit in (edits or {}).items()
        }
        self._load(block, f"{self.model.family.blocks}.{index}.", weights)
        block.to(self.computing.device)
        if self._ahead is not None and following is not None and following < len(self._blocks):
            self._ahead.begin(
                self._stored(self._blocks[following], f"{self.model.family.blocks}.{following}.")
            )
        try:
            yield block
        finally:
            block.to("meta")

    def stored_weight(self, linear: LinearPlan, edit: WeightEdit | None = None) -> Tensor:
        """One matrix as it is in the model's files, edited, on the computing device: not rounded to the computing dtype."""
        value = self.model.checkpoint.read(linear.parameter)
        return (edit(value) if edit else value).to(self.computing.device)

    def linears(self, index: int, block: nn.Module) -> dict[str, nn.Linear]:
        """The block's prunable linears by canonical name."""
        return {name: block.get_submodule(path) for name, path in self.model.family.linears.items()}  # type: ignore[misc]

    @torch.no_grad()
    def start(self, windows: Tensor) -> Activations:
        """Embed token windows, shape (windows, tokens), int64; the result stands before the first block."""
        batches = list(windows.to(self.computing.device).split(windows_per_batch(windows.shape[1])))
        hidden = hidden_states(self.computing.activations_folder)
        calls = list[list[Call]]()
        with self._loaded(self._decoder) as decoder:
            for batch in batches:
                decoder(input_ids=batch, use_cache=False)
                first = self._relays[0].received
                assert first is not None
                hidden.append(first)
                passed = [relay.call for relay in self._relays]
                calls.append(calls[-1] if calls and _alike(calls[-1], passed) else passed)
                for relay in self._relays:
                    relay.received = None
                    relay.call = ((), {})
        return Activations(batches, hidden, calls)

    def resume(self, windows: Tensor, kept: BinaryIO) -> Activations:
        """Activations that stand where the bytes in ``kept`` were taken from ``Activations.pieces``.

        Raises
        ------
        Mistake
            There are fewer or more bytes than these windows have in the computing dtype.
        """
        activations = self.start(windows)
        for batch in range(len(activations.hidden)):
            hidden = torch.empty_like(activations.hidden[batch], device="cpu")
            if kept.readinto(memory_of(hidden)) != hidden.nbytes:  # type: ignore[attr-defined]
                raise Mistake(
                    "the kept hidden states are too short; remove this client's private state and"
                    " start anew"
                )
            activations.hidden[batch] = hidden.to(self.computing.device)
        if kept.read(1):
            raise Mistake(
                "the kept hidden states are too long; remove this client's private state and start"
                " anew"
            )
        return activations

    @contextmanager
    def final_norm(self) -> Iterator[nn.Module]:
        """Load the norm behind the last block; the identity in a model that has none there, such as OPT-350M."""
        path = self.model.family.final_norm
        parent, _, name = path.rpartition(".")
        if not path or getattr(self._skeleton.get_submodule(parent), name) is None:
            yield nn.Identity()
            return
        with self._loaded(path) as norm:
            yield norm

    @torch.no_grad()
    def logits(self, activations: Activations) -> Iterator[Tensor]:
        """Final norm and head over the hidden states after the last block, token by token.

        Yields
        ------
        (tokens, vocabulary), of as many tokens as ``tokens_at_once`` says: all tokens of the first window, then of the next
        """
        last = self._relays[-1]
        with self._without_unused_embeddings() as width, self._loaded("") as skeleton:
            at_once = tokens_at_once(skeleton.config.vocab_size)
            try:
                for batch in range(len(activations.hidden)):
                    # Norm and head look at one token at a time, so each can be a window of its own.
                    for piece in activations.hidden[batch].flatten(0, 1)[:, None].split(at_once):
                        last.answer = piece
                        embedded = piece.new_zeros(1).expand(len(piece), 1, width)
                        yield skeleton(inputs_embeds=embedded, use_cache=False).logits.squeeze(1)
            finally:
                last.answer = None

    @contextmanager
    def _without_unused_embeddings(self) -> Iterator[int]:
        """Take the embeddings out of the skeleton, unless they are its head too; gives their width."""
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
        """Load what a submodule has beside the blocks: embeddings, norms, head; it is dropped on leaving."""
        module = self._skeleton.get_submodule(path)
        self._load(module, f"{path}." if path else "", {})
        if not path:
            module.tie_weights()
        try:
            yield module.to(self.computing.device)
        finally:
            drop_weights(module)

    def _load(self, module: nn.Module, prefix: str, edits: Mapping[str, WeightEdit]) -> None:
        """Give a module's parameters and persistent buffers the values of the checkpoint; tied ones may be missing."""
        values: dict[str, Tensor] = {}
        for full in self._stored(module, prefix):
            name = full.removeprefix(prefix)
            value = (
                self._ahead.take(full)
                if self._ahead is not None
                else self.model.checkpoint.read(full)
            )
            values[name] = self._computed(edits[name](value) if name in edits else value)
        module.load_state_dict(values, strict=False, assign=True)

    def _stored(self, module: nn.Module, prefix: str) -> list[str]:
        """What the checkpoint has of a module, by its names there."""
        return [
            prefix + name
            for name in module.state_dict()
            if prefix + name in self.model.checkpoint.tensors
        ]

    def _computed(self, value: Tensor) -> Tensor:
        """A stored tensor in the computing dtype on its device: made wider there, where it costs no bytes on the way."""
        value = value.to(self.computing.device, non_blocking=True)
        return value.to(self.computing.dtype) if value.is_floating_point() else value

    def _require_tensors(self, module: nn.Module, prefix: str) -> None:
        """Raise Mistake if the checkpoint lacks a tensor of a module, or has it in another shape; none is read."""
        stored = self.model.checkpoint.tensors
        tied = set(getattr(self._skeleton, "all_tied_weights_keys", {}) or {})
        for name, wanted in module.state_dict().items():
            if (found := stored.get(prefix + name)) is None:
                if prefix + name not in tied:
                    raise missing_tensor(self.model, prefix + name)
            elif found.shape != tuple(wanted.shape):
                raise wrong_shape(self.model, prefix + name, tuple(wanted.shape))


def not_finite(stream: BlockStream, what: str) -> Mistake:
    """Return the error about hidden states or logits that are not finite; ``what`` begins it, as ``block 1 gives``."""
    where = stream.model.directory
    if stream.computing.dtype == torch.float16:
        return Mistake(
            f"dtype = 'float16': {what} NaN or numbers beyond 65504 in {where}, where float16"
            f" overflows to infinity; {FLOAT16_REMEDY}"
        )
    wider = "" if stream.computing.dtype == torch.float32 else "set dtype to 'float32', or "
    return Mistake(
        f"{where}: {what} NaN or infinite numbers, so nothing can be learnt from them;"
        f" {wider}see whether the model is damaged"
    )


def windows_per_batch(tokens: int) -> int:
    """How many windows of so many tokens pass through a block together: see ``TOKENS_PER_BATCH``."""
    return max(1, TOKENS_PER_BATCH // tokens)


def _alike(one: Any, other: Any) -> bool:
    """Whether two arguments are the same, tensors by value: most models pass the same to every batch."""
    if isinstance(one, Tensor):
        same = isinstance(other, Tensor) and one.shape == other.shape and one.dtype == other.dtype
        return same and torch.equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_alike(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_alike, one, other))
    return one is other or (isinstance(one, (bool, int, float, str)) and one == other)


def drop_weights(module: nn.Module) -> None:
    """Replace all parameters by ones without memory; buffers stay."""
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            setattr(part, name, nn.Parameter(parameter.detach().to("meta"), requires_grad=False))


@torch.no_grad()
def apply_prune_masks(linears: dict[str, nn.Linear], prune_masks: dict[str, Tensor]) -> None:
    """Set the masked weights of a loaded block to zero; masks are bool, shaped like the weights."""
    for name, prune_mask in prune_masks.items():
        weight = linears[name].weight
        weight.masked_fill_(prune_mask.to(weight.device), 0)


@torch.no_grad()
def run_through(stream: BlockStream, windows: Tensor, edits: Edits = dense) -> Activations:
    """Pass token windows, shape (windows, tokens), through all blocks of the edited model; ``stream.logits`` finishes."""
    activations = stream.start(windows)
    for block_plan in beats(stream.model.plan.blocks, "passing block"):
        with stream.block(block_plan.index, edits(block_plan.index), block_plan.index + 1) as block:
            activations.through(block_plan.index, block)
    return activations
