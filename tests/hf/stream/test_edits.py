"""Effect of edits on a weight, compared with values computed by hand."""

import torch

from espalier.hf.stream.edits import dense, masked

WEIGHT = torch.tensor([[1.0, -2.0, 3.0], [4.0, 5.0, -6.0]])
MASK = torch.tensor([[True, False, False], [False, False, True]])


def test_masked_weights_are_zero_others_untouched() -> None:
    (edit,) = masked(lambda index: {"attn.q": MASK})(0).values()
    assert edit(WEIGHT).tolist() == [[0, -2, 3], [4, 5, 0]]
    assert WEIGHT[0, 0] == 1


def test_scales_are_the_shares_of_keepers() -> None:
    """4 clients with votes [[4, 1, 0], [2, 4, 3]] to prune.

    The scales are the fractions of clients that keep a weight, [[0, 3/4, 1], [1/2, 0, 1/4]]. A
    weight with the votes of all clients becomes 0.
    """
    share = torch.tensor([[0, 0.75, 1], [0.5, 0, 0.25]])
    edit = masked(lambda index: {"attn.q": MASK}, lambda index: {"attn.q": share})(0)["attn.q"]
    assert edit(WEIGHT).tolist() == [[0, -1.5, 3], [2, 0, 0]]


def test_scaling_rounds_to_the_weight_s_own_dtype() -> None:
    """The product is rounded to bfloat16, which has 8 significant bits."""
    weight = torch.tensor([[1.0078125]], dtype=torch.bfloat16)
    share = torch.tensor([[2 / 3]])
    none = torch.zeros(1, 1, dtype=torch.bool)
    edited = masked(lambda index: {"mlp.up": none}, lambda index: {"mlp.up": share})(0)["mlp.up"](
        weight
    )
    assert edited.dtype == torch.bfloat16
    assert abs(edited.item() - 1.0078125 * 2 / 3) <= 0.671875 * 2**-8


def test_the_dense_model_has_no_edits() -> None:
    assert dense(3) == {}
