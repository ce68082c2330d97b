"""Chains of bases over several runs."""

from pathlib import Path

import pytest

from espalier.hf.opening.opened_model import OpenedModel
from espalier.results.base_chain import chain_of, in_words, run_of
from tests.results.made_runs import pruned_run
from tests.tiny_model import save_tiny_llama


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save_tiny_llama(tmp_path / "base")


def test_model_without_a_run_is_a_chain_of_one(base: Path) -> None:
    (link,) = chain_of(OpenedModel(base))
    assert link.to_json() == {
        "model": "base", "revision": None, "sha256": OpenedModel(base).sha256, "path": str(base),
        "run": None, "method": None,
    }  # fmt: skip
    assert in_words([link]) == ""


def test_chain_names_the_run_that_made_a_base(base: Path, tmp_path: Path) -> None:
    run = pruned_run(tmp_path / "runs" / "a", base)
    pruned = OpenedModel(run / "model")
    own, first = chain_of(pruned)
    assert (own.model, own.path, own.run, own.method) == (
        "base, flap", str(run / "model"), str(run), "flap",
    )  # fmt: skip
    assert own.sha256 == pruned.sha256
    assert (first.model, first.sha256, first.run) == ("base", OpenedModel(base).sha256, None)
    words = in_words([own, first])
    assert words == (
        f"`base` (SHA-256 `{first.sha256}`), then `flap` in run `a` (SHA-256 `{own.sha256}`)"
    )
    assert str(tmp_path) not in words


def test_run_of_a_client_s_model(base: Path, tmp_path: Path) -> None:
    run = pruned_run(tmp_path / "runs" / "a", base)
    assert run_of(run / "clients" / "client-0") == run
    assert run_of(run / "model") == run
    assert run_of(base) is None
