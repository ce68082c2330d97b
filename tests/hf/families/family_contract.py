"""Contract of every model family: one abstract class, one subclass per family (``test_llama.py``).

A subclass names a tiny configuration and the Hugging Face path of each canonical linear. The tests
compare everything else with the whole model in memory, as transformers loads it.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from espalier.data.tasks.encoding import Marked
from espalier.data.tasks.item import collate
from espalier.evaluation.perplexity import mean_losses
from espalier.hf.export.model import check_export, export_edited
from espalier.hf.machine.computing import Computing
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.stream import edits
from espalier.hf.stream.block_stream import BlockStream, run_through
from espalier.hf.stream.calibration import prune_by_block
from espalier.models.plan import BlockPlan
from espalier.training.loss import summed_loss
from espalier.training.packing import PackedSequences
from tests.devices import assert_close
from tests.hf.tiny_models import random_masks, save_model, token_sequences, whole_model

VARIANTS: dict[str, dict[str, Any]] = {
    "one file": {},
    "sharded": {"max_shard_size": "20KB"},
    "tied": {"tie_word_embeddings": True},
    "tied and sharded": {"tie_word_embeddings": True, "max_shard_size": "20KB"},
}


def masks_of(block: BlockPlan) -> dict[str, Tensor]:
    return random_masks({linear.name: linear.shape for linear in block.linears}, block.index)


def lowest_half_of_each_row(weight: Tensor, square_sum: Tensor) -> Tensor:
    """Return Wanda's prune mask for half of each row, computed by sorting Python lists."""
    mask = torch.zeros(weight.shape, dtype=torch.bool)
    norms = [math.sqrt(value) for value in square_sum.tolist()]
    for row, values in enumerate(weight.tolist()):
        order = sorted(
            range(len(values)), key=lambda column: (abs(values[column]) * norms[column], column)
        )
        mask[row, order[: len(order) // 2]] = True
    return mask


@torch.no_grad()
def pruned_in_memory(
    model: nn.Module, blocks: str, linears: dict[str, str], samples: Tensor
) -> list[dict[str, Tensor]]:
    """Prune a whole model in memory with Wanda and return the prune mask of each block's linears.

    For each block: record the inputs of its dense linears, then set the selected weights to zero,
    so that the next block sees the outputs of the pruned one.
    """
    masks = []
    for block in model.get_submodule(blocks):
        watched = {name: block.get_submodule(path) for name, path in linears.items()}
        sums: dict[str, Tensor] = {}

        def watch(name: str, sums: dict[str, Tensor] = sums) -> Callable[..., None]:
            def add(_: nn.Module, inputs: tuple[Tensor, ...], __: Tensor) -> None:
                squares = inputs[0].to(torch.float64).flatten(0, -2).square()
                for token in squares:
                    sums[name] = sums[name] + token if name in sums else token

            return add

        hooks = [linear.register_forward_hook(watch(name)) for name, linear in watched.items()]
        model(input_ids=samples, use_cache=False)
        for hook in hooks:
            hook.remove()
        masks.append(
            {
                name: lowest_half_of_each_row(linear.weight, sums[name])
                for name, linear in watched.items()
            }
        )
        for name, linear in watched.items():
            linear.weight[masks[-1][name]] = 0
    return masks


class FamilyContract(ABC):
    """Tests of one family; ``saved`` runs them for one file, shards, tied and untied embeddings."""

    blocks: ClassVar[str]
    linears: ClassVar[dict[str, str]]
    kv_groups: ClassVar[tuple[int, int]]
    part: ClassVar[str] = ""
    """Path of the part of a block whose linears all have canonical names."""

    @abstractmethod
    def config(self, **changes: Any) -> PretrainedConfig:
        """Return a tiny configuration, with grouped-query attention if the family supports it."""

    @pytest.fixture(params=VARIANTS.values(), ids=VARIANTS.keys())
    def saved(self, request: pytest.FixtureRequest, tmp_path: Path) -> Path:
        changes = dict(request.param)
        shard = changes.pop("max_shard_size", "1GB")
        return save_model(tmp_path / "saved", self.config(**changes), max_shard_size=shard)

    @pytest.fixture
    def opened(self, saved: Path) -> OpenedModel:
        return OpenedModel(saved)

    def test_the_variants_are_what_their_names_say(
        self, saved: Path, request: pytest.FixtureRequest
    ) -> None:
        name = request.node.callspec.id
        assert (len(list(saved.glob("*.safetensors"))) > 1) == ("sharded" in name)
        assert ("lm_head.weight" in OpenedModel(saved).checkpoint.tensors) == ("tied" not in name)

    def test_plan_names_exactly_the_block_linears(self, opened: OpenedModel) -> None:
        model = whole_model(opened.directory)
        expected = {
            f"{self.blocks}.{index}.{path}.weight": tuple(module.weight.shape)
            for index, block in enumerate(model.get_submodule(self.blocks))
            for path, module in block.named_modules()
            if isinstance(module, nn.Linear) and path.startswith(self.part)
        }
        found = {
            linear.parameter: linear.shape
            for block in opened.plan.blocks
            for linear in block.linears
        }
        assert found == expected
        assert opened.plan.num_weights == sum(math.prod(shape) for shape in expected.values())

    def test_linears_have_their_canonical_names(self, opened: OpenedModel) -> None:
        for index, block in enumerate(opened.plan.blocks):
            assert {linear.name: linear.parameter for linear in block.linears} == {
                name: f"{self.blocks}.{index}.{path}.weight" for name, path in self.linears.items()
            }

    def test_parameters_are_counted_once_tied_or_not(self, opened: OpenedModel) -> None:
        """Compare with ``parameters()`` of torch, which yields a shared parameter once."""
        assert opened.plan.num_parameters == sum(
            parameter.numel() for parameter in whole_model(opened.directory).parameters()
        )

    def test_attention_groups(self, opened: OpenedModel) -> None:
        plan = opened.plan
        heads = plan.blocks[0].linear("attn.o").shape[1] // plan.head_dim
        assert (heads // plan.heads_per_group, plan.heads_per_group) == self.kv_groups

    @torch.no_grad()
    def test_streamed_logits_equal_whole_model(
        self, opened: OpenedModel, computing: Computing
    ) -> None:
        samples = token_sequences(11, 9)
        stream = BlockStream(opened, computing)
        found = torch.cat(list(stream.logits(run_through(stream, samples)))).view(
            *samples.shape, -1
        )
        expected = whole_model(opened.directory)(input_ids=samples, use_cache=False).logits
        assert_close(found, expected)

    @torch.no_grad()
    def test_perplexity_equals_plain_transformers(
        self, opened: OpenedModel, computing: Computing
    ) -> None:
        samples = token_sequences(4, 11)
        (found,) = mean_losses(BlockStream(opened, computing), {"text": samples}).values()
        expected = whole_model(opened.directory)(input_ids=samples, labels=samples).loss.item()
        assert math.exp(found) == pytest.approx(math.exp(expected), rel=1e-4)

    def test_blockwise_pruning_equals_whole_pruning(
        self, opened: OpenedModel, computing: Computing
    ) -> None:
        samples = token_sequences(6, 10)
        found = dict(
            prune_by_block(BlockStream(opened, computing), samples, lowest_half_of_each_row)
        )
        whole = whole_model(opened.directory).to(computing.device)
        expected = pruned_in_memory(whole, self.blocks, self.linears, samples.to(computing.device))
        assert list(found) == list(range(len(expected)))
        for index, masks in enumerate(expected):
            assert set(found[index]) == set(masks)
            for name, mask in masks.items():
                assert torch.equal(found[index][name], mask), (index, name)

    @torch.no_grad()
    def test_export_equals_masked_model_bit_for_bit(
        self, opened: OpenedModel, tmp_path: Path, computing: Computing
    ) -> None:
        def masks(index: int) -> dict[str, Tensor]:
            return masks_of(opened.plan.blocks[index])

        export_edited(opened, edits.masked(masks), tmp_path / "model")
        masked = whole_model(opened.directory)
        for index, block in enumerate(masked.get_submodule(self.blocks)):
            for name, mask in masks(index).items():
                block.get_submodule(self.linears[name]).weight[mask] = 0
        samples = token_sequences(2, 8)
        found = AutoModelForCausalLM.from_pretrained(tmp_path / "model", local_files_only=True)
        assert torch.equal(found(input_ids=samples).logits, masked(input_ids=samples).logits)
        check_export(
            BlockStream(opened, computing), edits.masked(masks), tmp_path / "model", samples
        )

    def test_packed_records_do_not_see_each_other(self, opened: OpenedModel) -> None:
        """The loss of packed rows is the sum of the losses of their records."""
        tokens = token_sequences(6, 9).tolist()
        records = [
            Marked(tuple(row[: 9 - number]), ((3, 9 - number),))
            for number, row in enumerate(tokens)
        ]
        model = whole_model(opened.directory)
        cpu = torch.device("cpu")
        with torch.no_grad():
            alone = sum(float(summed_loss(model, collate([one], 0), cpu)) for one in records)
            together = float(summed_loss(model, collate(PackedSequences(records, 20), 0), cpu))
        assert (together == pytest.approx(alone, rel=1e-4)) == opened.family.packs
