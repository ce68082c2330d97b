"""The head of a model sees only what counts, and the loss and its gradients are the same."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from espalier.data.tasks.item import NOT_COUNTED, Batch
from espalier.training.loss import counted_predictions, summed_loss
from tests.hf.tiny_models import OWN_KEYS, VOCABULARY, random_model, tiny_config, token_sequences

CPU = torch.device("cpu")
ANSWERS = torch.tensor(
    [[0, 0, 0, 0, 0, 1, 1], [0, 0, 1, 1, 0, 0, 1], [0, 0, 0, 0, 0, 0, 0]], dtype=torch.bool
)
"""Tokens that count; the last sequence has none."""


def batch() -> Batch:
    ids = token_sequences(*ANSWERS.shape)
    mask = torch.ones_like(ids)
    mask[1, 0] = 0
    return Batch(ids, mask, ids.masked_fill(~ANSWERS, NOT_COUNTED))


def loss_of_all_logits(model: nn.Module) -> Tensor:
    """Return the same loss from the logits of all tokens."""
    given = batch()
    logits = model(input_ids=given.input_ids, attention_mask=given.attention_mask).logits
    return nn.functional.cross_entropy(
        logits[:, :-1].reshape(-1, VOCABULARY).float(),
        given.labels[:, 1:].flatten(),
        reduction="sum",
    )


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", OWN_KEYS)
def test_loss_and_gradients_are_those_of_all_logits(kind: str) -> None:
    model = random_model(tiny_config(kind))
    found, expected = summed_loss(model, batch(), CPU), loss_of_all_logits(model)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients(model, found), gradients(model, expected))


def test_compiled_model_has_the_same_loss() -> None:
    model: Any = random_model(tiny_config("llama"))
    compiled = torch.compile(model, backend="eager")
    expected = summed_loss(model, batch(), CPU)
    torch.testing.assert_close(summed_loss(compiled, batch(), CPU), expected)
    torch.testing.assert_close(summed_loss(model, batch(), CPU), expected)


def test_head_sees_only_what_counts() -> None:
    model: Any = random_model(tiny_config("llama"))
    seen = []
    model.get_output_embeddings().register_forward_hook(
        lambda _, inputs, outputs: seen.append((inputs[0].shape, outputs.shape))
    )
    counted_predictions(model, batch(), CPU)
    width = model.config.hidden_size
    assert seen == [((5, width), (5, VOCABULARY))]
    # Nothing stays behind.
    model(input_ids=token_sequences(1, 4))
    assert seen[1:] == [((1, 4, width), (1, 4, VOCABULARY))]


def test_a_model_that_fails_keeps_no_hook() -> None:
    model = random_model(tiny_config("llama"))
    wrong = batch()
    wrong.input_ids[0, 0] = VOCABULARY
    with pytest.raises(IndexError):
        counted_predictions(model, wrong, CPU)
    assert model(input_ids=token_sequences(1, 4)).logits.shape == (1, 4, VOCABULARY)
