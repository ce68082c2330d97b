"""One client per site and run, and one answer; sites that share a state directory."""

from typing import Any

import pytest

from espalier.messages.message import UNREAD, MessageBody
from espalier.messages.records import address, read
from espalier.storage.client_state import mark_as_ours, private_folder
from espalier.storage.hash_chain import chain_check
from espalier.training.loop import Loop
from tests.bench import Bench, private_text
from tests.federation.sites.one_site import OneSite, tuning
from tests.run_names import BY_HAND, named

# ----- two sites, one state directory -------------------------------------------------------------


def test_sites_sharing_state_keep_own_masks(bench: Bench) -> None:
    shared = {"state-dir": str(bench.folder / "shared")}
    first = OneSite(bench, shared).ask("train")
    other = OneSite(
        bench, {**shared, "site": "theatre", "data-path": str(bench.folder / "text-1.txt")}
    )
    second = other.ask("train")
    alone = OneSite(bench, {"site": "theatre", "data-path": str(bench.folder / "text-1.txt")}).ask(
        "train"
    )
    assert second.blobs == alone.blobs != first.blobs


# ----- one client per site, and one answer --------------------------------------------------------


@pytest.mark.parametrize("method", ["fedprllm", "fedspallm", "fedpetuning"])
def test_a_site_is_not_asked_as_several_clients(bench: Bench, method: str) -> None:
    """A server could otherwise ask for five clients with different samples of the same text."""
    bench = tuning(bench) if method == "fedpetuning" else bench
    bench.method = method
    fields = {
        "fedpetuning": {"rank_limit": 2},
        "fedspallm": {"blocks": [0], "versions": [0, 0]},
    }.get(method, {})
    site = OneSite(bench)
    first = site.ask("train", fields=fields)
    assert first.header.status == "ok", first.fields
    for client in (1, 2, 7):
        told = site.refusal("train", fields=fields, client=client)
        assert (
            told == "message: this site takes part in this run with another number; start a new run"
        )
    assert site.ask("train", fields=fields).blobs == first.blobs


def test_a_run_keeps_its_settings(bench: Bench) -> None:
    """A run could otherwise ask as much as many runs."""
    assert OneSite(bench).ask("train").header.status == "ok"
    told = OneSite(bench, data__num_samples=3).refusal("train")
    assert (
        told
        == "message: this site takes part in this run with another set of settings; start a new run"
    )


def test_an_evaluation_is_told_once(bench: Bench) -> None:
    site = OneSite(bench)
    site.ask("train")
    first = site.evaluate({"a": list(range(16)), "b": list(range(16, 32))})
    assert first.header.status == "ok", first.fields
    assert all(loss == round(loss, 3) for loss in first.fields["losses"])
    again = site.evaluate({"a": list(range(16)), "b": list(range(16, 32))}, attempt=2)
    assert again.fields == first.fields
    for texts in ({"a": list(range(16))}, {"a": list(range(16)), "b": list(range(17, 33))}):
        reply = site.evaluate(texts)
        assert (
            reply.fields["reason"]
            == "evaluate: this client answered another request of this run; start a new run"
        )


def test_evaluation_takes_named_texts_alone(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server could otherwise evaluate any number of invented texts at once."""
    site = OneSite(bench)
    tokens = list(range(16))
    site.ask("train")
    assert (
        site.evaluate({"a": tokens, "c": tokens}).fields["reason"]
        == "Texts: evaluation.texts names no such text"
    )
    names = ",".join(f"text-{number}=x.txt" for number in range(17))
    assert "17 texts, at most 16 are evaluated on" in OneSite(
        bench, evaluation__texts=names
    ).refusal("enrol", 0, lineage=named("c"))
    monkeypatch.setattr("espalier.messages.evaluation.MIN_PREDICTIONS", 1000)
    assert (
        site.evaluate({"a": tokens})
        .fields["reason"]
        .startswith("evaluation.texts: 'a' gives 15 predictions, sites evaluate")
    )


def test_steps_that_learn_nothing_do_not_count(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the first of four steps has a gradient, as with ruined adapters.

    The result therefore depends on one sequence of 16 tokens.
    """
    changes = {"training__steps": 4, "training__batch_size": 1}
    order = {"fields": {"rank_limit": 2}}
    assert (
        OneSite(tuning(bench), {"min-tokens": 64}, **changes)
        .ask("train", **order, lineage=named("a"))
        .header.status
        == "ok"
    )
    backward = Loop._backward

    def only_the_first(loop: Loop, called: Any, step: int) -> float:
        loss = backward(loop, called, step)
        for parameter in loop.parameters.values() if step else ():
            parameter.grad = None
        return loss

    monkeypatch.setattr(Loop, "_backward", only_the_first)
    for least, status in ((17, "failed"), (16, "ok")):
        site = OneSite(tuning(bench), {"min-tokens": least}, **changes)
        reply = site.ask("train", **order, lineage=named(f"b{least}"))
        assert reply.header.status == status, reply.fields
        assert status == "ok" or reply.fields["reason"].startswith(
            "min-tokens = 17: the answer would be computed from fewer tokens"
        )
    told = OneSite(tuning(bench), {}, training__learning_rate=1e30).refusal(
        "train", **order, lineage=named("c")
    )
    assert "training.learning-rate = 1e+30: input should be less than or equal to 0.1" in told
    told = OneSite(tuning(bench), {}, lora__dropout=0.9999).refusal(
        "train", **order, lineage=named("d")
    )
    assert "lora.dropout = 0.9999: input should be less than or equal to 0.5" in told


@pytest.mark.parametrize("method", ["fedprllm", "fedspallm", "fedpetuning"])
@pytest.mark.parametrize("kind", ["train", "fetch", "push", "evaluate", "enrol"])
def test_round_beyond_run_is_refused(bench: Bench, method: str, kind: str) -> None:
    bench = tuning(bench) if method == "fedpetuning" else bench
    bench.method = method
    told = (
        "an enrol of round 400 does not exist"
        if kind == "enrol"
        else f"a {kind} of round 400 does not exist, the run ends with"
    )
    assert told in OneSite(bench).refusal(kind, 400)


def test_evaluation_alone_does_not_train(bench: Bench) -> None:
    """The site would otherwise train on one sequence.

    A server could then recognize it by its score among nine texts.
    """
    (bench.folder / "text-0.txt").write_text(" ".join(private_text(0).split()[:8]))
    site = OneSite(tuning(bench), {"min-tokens": 0})
    reason = site.refusal("local_baseline", 2, {"rank_limit": 0})
    assert reason.startswith(
        "min-tokens = 2048: the answer would be computed from fewer tokens; give the site more data"
    )
    assert "made nothing by itself" in site.evaluate({"a": list(range(16))}, 2).fields["reason"]


# ----- one state directory ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["models", "egress", "corpora", "quantised", "at-work", "lock", "a-b", "..", "a/b", ""]
)
def test_a_run_is_not_called_as_what_a_node_keeps(bench: Bench, name: str) -> None:
    """The site refuses the request before it creates anything under that name."""
    site = OneSite(bench)
    message = address(MessageBody(UNREAD.model_copy(update={"lineage": name})), 1000, 60.0)
    reply = read(site.grid.answer(message, site.grid.contexts[1000]).content)
    assert "lineage" in reply.fields["reason"]
    assert not (bench.folder / "state").exists()


def test_sites_sharing_state_keep_own_logs(bench: Bench) -> None:
    """Log names stay distinct if one site's name ends like another's.

    Run names must not make up the difference either.
    """
    runs = [BY_HAND, named("another")]
    for name in ("ward", "a-ward", BY_HAND):
        for run in runs:
            assert OneSite(bench, {"site": name}).ask("train", lineage=run).header.status == "ok"
    logs = sorted((bench.folder / "state" / "egress").glob("*.jsonl"))
    assert len(logs) == 6
    for log in logs:
        checked = chain_check(log)
        assert checked.fault == ""
        assert log.name == f"{checked.origin['lineage']}-{checked.origin['site']}.jsonl"
        assert len(log.read_text().splitlines()) == 1
    assert len(list((bench.folder / "state").glob("2*/*/r001"))) == 6


def test_other_folders_of_state_are_no_runs(bench: Bench) -> None:
    """A site's name may equal the name of a model's folder, which has a version file too."""
    name = "0" * 64
    mark_as_ours(private_folder(bench.folder / "state", "models", name))
    assert OneSite(bench, {"site": name, "max-runs": 1}).ask("train").header.status == "ok"
