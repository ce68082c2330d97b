"""Selection of the groups that are removed, and impossible pruning ratios."""

from pathlib import Path
from typing import Any

import pytest
import torch

from espalier.errors import EspalierError
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.structured.selection import lowest
from espalier.methods.pruning.llm_pruner import LlmPrunerSettings
from espalier.models.groups import Groups
from espalier.settings.pruning import StructuredSettings
from tests.hf.tiny_models import llama_config, save_model


def test_scores_that_are_no_numbers_are_a_mistake(saved: dict[str, Path]) -> None:
    """A NaN in the weights leads to NaN scores."""
    groups = Groups.of(OpenedModel(saved["llama"]).plan)
    scores = torch.ones(len(groups.costs))
    scores[groups.at(2, "channels")][5] = torch.nan
    with pytest.raises(EspalierError, match="look for weights of the model that are not finite"):
        lowest(groups, scores, StructuredSettings(), 0.2)


@pytest.mark.parametrize(
    ("heads", "given", "remedy"),
    [
        (
            1,
            {"selection": "kind", "ratio": 0.01},
            "; set pruning.selection to global$",
        ),
        (1, {"selection": "global", "ratio": 0.99}, "one channel of each block; lower it$"),
        (1, {"selection": "global", "channel-multiple": 64}, "; lower channel-multiple$"),
        (
            4,
            {"selection": "kind", "channel-multiple": 48},
            "48 channels .*; lower channel-multiple or set pruning.selection to global$",
        ),
    ],
)
def test_impossible_share_is_told_with_remedy(
    tmp_path: Path, heads: int, given: dict[str, Any], remedy: str
) -> None:
    """The only group of a kind must stay, however low the pruning ratio is."""
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    plan = OpenedModel(
        save_model(tmp_path, llama_config(**sizes, num_key_value_heads=heads, head_dim=16))
    ).plan
    with pytest.raises(EspalierError, match=remedy):
        Groups.of(plan).reachable(StructuredSettings.model_validate(given))


def test_uncuttable_units_suggest_no_other_share(tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 1,
        "num_hidden_layers": 2,
        "num_attention_heads": 1,
    }
    plan = OpenedModel(
        save_model(tmp_path, llama_config(**sizes, num_key_value_heads=1, head_dim=16))
    ).plan
    with pytest.raises(
        EspalierError,
        match="some blocks have no removable groups, whatever the ratio",
    ):
        Groups.of(plan).reachable(StructuredSettings(pruning_ratio=0.1))


@pytest.mark.parametrize("selection", ["global", "block", "kind"])
@pytest.mark.parametrize("multiple", [1, 16])
def test_what_is_gone_stays_gone_and_counts(
    saved: dict[str, Path], selection: str, multiple: int
) -> None:
    """Prune several times with new scores; cut groups stay cut and count towards the ratio.

    Each time at least the requested fraction is cut; each kind keeps one group in each block.
    """
    groups = Groups.of(OpenedModel(saved["llama"]).plan)
    generator = torch.Generator().manual_seed(2)
    gone = None
    costs = list[int]()
    for share in (0.0, 0.1, 0.1, 0.25, 0.4):
        job = StructuredSettings.model_validate(
            {"ratio": 0.5, "channel-multiple": multiple, "selection": selection}
        )
        scores = torch.rand(len(groups.costs), generator=generator)
        found = lowest(groups, scores, job, share, gone)
        cost = int(groups.costs[found].sum())
        assert cost >= share * int(groups.costs.sum())
        if gone is not None:
            assert (found >= gone).all()
        if multiple == 1 and selection == "global":
            assert cost < share * int(groups.costs.sum()) + int(groups.costs.max())
        stay = groups.stay(found)
        assert stay.all()
        assert not (stay[1::2] % multiple).any()
        gone = found
        costs.append(cost)
    assert multiple > 1 or costs[1] == costs[2], "the same share again cuts nothing more"


@pytest.mark.parametrize("share", [0.1, 0.3, 0.6])
def test_multiple_of_channels_keeps_the_best(saved: dict[str, Path], share: float) -> None:
    """48, 32 or 16 of 48 channels stay: the highest by a plain sort.

    At least as many channels are cut as without the multiple.
    """
    groups = Groups.of(OpenedModel(saved["llama"]).plan)
    scores = torch.rand(len(groups.costs), generator=torch.Generator().manual_seed(1))
    freely = lowest(groups, scores, StructuredSettings(pruning_ratio=share), share)
    job = StructuredSettings.model_validate({"ratio": share, "channel-multiple": 16})
    found = lowest(groups, scores, job, share)
    for index in groups.blocks:
        channels = groups.at(index, "channels")
        stay = int((~found[channels]).sum())
        assert stay in (16, 32, 48)
        assert set(torch.topk(scores[channels], stay).indices.tolist()) == set(
            (~found[channels]).nonzero()[0].tolist()
        )
        assert found[channels].sum() >= freely[channels].sum() or stay == 16
        attention = groups.at(index, "groups")
        assert (found[attention] == freely[attention]).all()


@pytest.mark.parametrize("selection", ["global", "block", "kind", "search"])
def test_heads_that_a_norm_averages_over_stay(saved: dict[str, Path], selection: str) -> None:
    """Their scores are the lowest, and the ratio is reached by channels alone."""
    model = OpenedModel(saved["olmo2"])
    groups = Groups.of(model.plan)
    scores = torch.rand(len(groups.costs), generator=torch.Generator().manual_seed(5)).double()
    heads = groups.pools % 2 == 0
    scores[torch.from_numpy(heads)] = 0
    job = LlmPrunerSettings(pruning_ratio=0.3, selection=selection)
    cut = lowest(groups, scores, job, groups.reachable(job))
    assert not cut[heads].any()
    of_what = ~heads if selection == "kind" else slice(None)
    assert groups.costs[cut].sum() >= 0.3 * groups.costs[of_what].sum()
    if selection in ("global", "search"):
        # All channels cost the same, so the lowest ones are cut.
        assert scores[cut].max() <= scores[torch.from_numpy(~cut & ~heads)].min()
