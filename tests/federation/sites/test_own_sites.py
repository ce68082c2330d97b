"""Refusals of real sites: runs that would read, learn or take more than the owner allows.

Each test reproduces an attack that once worked. The nodes answer in this process but are not
simulated. Requests are handmade, as those of a malicious server.
"""

import json
import os
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.numpy import save

import client_app.app
import client_app.policy.egress_check
import client_app.site
from espalier.messages.message import SCHEMA_VERSION, UNREAD, Header, MessageBody
from espalier.messages.records import address, read
from espalier.storage.client_state import mark_as_ours, private_folder
from espalier.storage.hash_chain import chain_check
from espalier.training.loop import Loop
from tests.bench import EVALUATED, LOCAL_ONLY, Bench, private_text
from tests.in_process import InProcessGrid
from tests.run_names import BY_HAND, named

SECRET = "the-patient-s-name"


class OneSite:
    """Real site with its own text, and a server that may ask for anything."""

    def __init__(self, bench: Bench, node: dict[str, Any] | None = None, **changes: Any) -> None:
        own = {
            "data-path": str(bench.folder / "text-0.txt"),
            "model-path": str(bench.model),
            "min-tokens": 20,
        }
        self.node = {"site": "ward", **own, **(node or {})}
        self.run = bench.config(**{"evaluation__texts": "a=a.txt,b=b.txt"} | changes)
        self.grid = InProcessGrid(bench.grid().app, [self.node], self.run)
        self.grid.simulated = False

    def ask(
        self,
        kind: str,
        server_round: int | None = None,
        fields: dict[str, Any] | None = None,
        **header: Any,
    ) -> MessageBody:
        """Return the site's reply; ``header`` may replace header fields and add ``blobs``."""
        blobs = header.pop("blobs", {})
        if server_round is None:
            server_round = 0 if kind == "enrol" else 1
        common = {
            "schema_version": SCHEMA_VERSION,
            "lineage": BY_HAND,
            "client": 0,
            "attempt": 1,
            "part": 0,
            "num_parts": 1,
        }
        values = (
            common
            | {"kind": kind, "method": self.run["method"], "server_round": server_round}
            | header
        )
        (node_id, context), *_ = self.grid.contexts.items()
        message = address(
            MessageBody(Header.model_validate(values), fields or {}, blobs), node_id, 60.0
        )
        return read(self.grid.answer(message, context).content)

    def refusal(self, *arguments: Any, **named: Any) -> str:
        """Return the reason why the site refused."""
        reply = self.ask(*arguments, **named)
        assert reply.header.status == "failed", reply.fields
        assert not reply.blobs
        # A refusal to enrol starts with the site's name.
        return str(reply.fields["reason"]).removeprefix("site ward: ")

    def evaluate(
        self, texts: dict[str, list[int]], server_round: int = 1, **header: Any
    ) -> MessageBody:
        """Ask for the loss on invented evaluation texts of 16 tokens each."""
        samples = {
            name: torch.tensor([tokens], dtype=torch.int32).numpy()
            for name, tokens in texts.items()
        }
        fields = {
            "names": list(texts), "num_samples": [1] * len(texts), "sequence_length": 16, "own_text": False, "test_metrics": [],
            "test_items": 0, "test_requests": 0, "test_tokens": 0,
        }  # fmt: skip
        return self.ask(
            "evaluate", server_round, fields, blobs={"public-samples": save(samples)}, **header
        )


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setenv("ESPALIER_STATE_DIR", str(tmp_path / "state"))
    return Bench(tmp_path, "fedprllm", EVALUATED | {"evaluation.own-text": False}, num_clients=2)


def tuning(bench: Bench) -> Bench:
    bench.method = "fedpetuning"
    bench.settings = LOCAL_ONLY | {
        "lora.rank": 2, "lora.targets": "attn.q", "training.steps": 2, "training.batch-size": 2,
        "federation.rounds": 2,
    }  # fmt: skip
    return bench


# ----- outgoing data ------------------------------------------------------------------------------


def test_no_answer_depends_on_two_tokens(bench: Bench) -> None:
    """A server could guess two calibration tokens and verify the guess."""
    changes = {"data__num_samples": 1, "data__sequence_length": 2}
    site = OneSite(bench, {"min-tokens": 0}, **changes)
    assert "min-tokens = 2048: the answer would be computed from fewer tokens" in site.refusal(
        "train"
    )
    reply = OneSite(bench).ask("train", lineage=named("b"))
    assert sorted(reply.fields) == ["blob_sha256", "seconds"]


@pytest.mark.parametrize("own_samples", [2, 5])
def test_amount_of_text_does_not_leave_site(bench: Bench, own_samples: int) -> None:
    """A sample has 16 tokens; the run asks for 2000 samples, and the site has fewer."""
    site = OneSite(bench, data__num_samples=2000)
    told = site.refusal("train")
    assert told.startswith(
        "data: the client's text gives too few samples of data.sequence-length = 16 tokens"
    )
    assert not any(character.isdigit() for character in told.replace("= 16 tokens", ""))
    site = OneSite(bench, {"num-samples": own_samples})
    assert site.ask("train", lineage=named("b")).fields.keys() == {"seconds", "blob_sha256"}


@pytest.mark.parametrize(
    "content", [b"fine\n\n" * 9 + b"\xff\xfe", b""], ids=["not UTF-8", "empty"]
)
def test_file_errors_stay_in_site_s_log(
    bench: Bench, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    file = bench.folder / f"{SECRET}.txt"
    file.write_bytes(content)
    told = OneSite(bench, {"data-path": str(file)}).refusal("train")
    assert (
        told
        == "data-path: this site's data cannot be used for this run; the node's log gives the reason"
    )
    assert SECRET in caplog.text


def test_numbers_of_lines_do_not_leave_either(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    file = bench.folder / "records.jsonl"
    file.write_text('{"text": "a"}\n' * 6 + "[]\n")
    told = OneSite(bench, {"data-path": str(file)}).refusal("train")
    assert (
        told
        == "data-path: this site's data cannot be used for this run; the node's log gives the reason"
    )
    assert "line 7 is not a JSON object" in caplog.text


# ----- fields and paths in the settings of a run --------------------------------------------------


@pytest.mark.parametrize("source", ["files", "hub"])
def test_run_s_path_is_not_opened_at_site(bench: Bench, source: str) -> None:
    file = bench.folder / "id_rsa"
    file.write_text(private_text(0))
    site = OneSite(bench, {"data-path": ""}, data__source=source, data__path=str(file))
    assert "this site names no file, and does not open files that a run names" in site.refusal(
        "train"
    )


def test_a_run_s_field_is_not_read(bench: Bench) -> None:
    """The site's records contain a text and a secret field."""
    file = bench.folder / "records.jsonl"
    file.write_text(
        "".join(
            json.dumps({"text": text, "name": SECRET}) + "\n"
            for text in private_text(0).split("\n\n")
        )
    )
    by_name = OneSite(bench, {"data-path": str(file)}, data__field="name").ask(
        "train", lineage=named("a")
    )
    plain = OneSite(bench, {"data-path": str(file)}).ask("train", lineage=named("b"))
    assert by_name.blobs == plain.blobs
    assert by_name.blobs
    chosen = OneSite(
        bench,
        {"data-path": str(file), "data-field": "name", "min-tokens": 1},
        data__sequence_length=2,
    )
    assert chosen.ask("train", lineage=named("c")).blobs != plain.blobs


def test_invalid_own_model_names_owner_s_key(bench: Bench) -> None:
    told = OneSite(bench, {"model-path": str(bench.folder)}).refusal("enrol")
    assert told.startswith("model-path in --node-config: ")
    assert "has no config.json" in told


def test_a_run_s_model_is_not_opened(bench: Bench) -> None:
    site = OneSite(bench, {"model-path": ""})
    for kind in ("enrol", "train"):
        told = site.refusal(kind)
        assert told.startswith(
            "model-path: this site names no base model, and does not open models that a run names"
        )


def test_task_records_are_read_if_declared(bench: Bench) -> None:
    tuning(bench)
    file = bench.folder / "reviews.jsonl"
    file.write_text(
        "".join(json.dumps({"sentence": f"good {n}", "label": n % 2}) + "\n" for n in range(40))
    )
    task = {"task__name": "sst2", "data__source": "files", "task__max_tokens": 32}
    site = OneSite(bench, {"data-path": str(file)}, **task)
    order = {"rank_limit": 2}
    assert (
        "data-task: this site's data-path contains text, but the run needs records of the task sst2"
        in site.refusal("train", fields=order)
    )
    site = OneSite(bench, {"data-path": str(file), "data-task": "sst2"}, **task)
    assert site.ask("train", fields=order, lineage=named("b")).header.status == "ok"
    site = OneSite(bench, {"data-path": str(file), "data-task": "sst2"})
    assert "contains records of the task sst2, but the run needs text" in site.refusal(
        "train", fields=order, lineage=named("c")
    )


def test_python_s_own_texts_may_be_read(bench: Bench) -> None:
    """Python's texts are on every machine; the README's deployment on one machine uses them."""
    reply = OneSite(bench, {"data-path": ""}, data__source="documentation").ask("train")
    assert reply.header.status == "ok", reply.fields


# ----- limits -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["enrol", "train"])
@pytest.mark.parametrize(
    ("node", "changes", "line"),
    [
        ({}, {"threads": 1000}, "threads = 1000: at most [0-9]+ are allowed here"),
        ({}, {"data__num_samples": 5000}, "max-samples = 4096: data.num-samples = 5000"),
        ({}, {"method": "fedpetuning", "training__batch_size": 16385}, "max-batch-tokens = 262144: .* of a sequence = 262160"),
        ({"max-rounds": 2}, {"method": "fedspallm", "federation__rounds": 3}, "max-rounds = 2: federation.rounds = 3"),
        ({"allowed-methods": "fedspallm,hetlora"}, {}, "allowed-methods = 'fedspallm,hetlora': the run's method is 'fedprllm'"),
        ({"require-site-keys": True}, {}, "require-site-keys: in this run anyone could use this site's name"),
    ],
)  # fmt: skip
def test_disallowed_run_is_refused_in_words(
    bench: Bench, kind: str, node: dict[str, Any], changes: dict[str, Any], line: str
) -> None:
    told = OneSite(bench, node, **changes).refusal(kind)
    assert told.startswith(
        "this site does not allow the run; change these values, or ask the site's owner to change"
        " --node-config:\n"
    )
    assert re.search(line, told), told


def test_rounds_that_a_method_adds_are_rounds_too(bench: Bench) -> None:
    """FedSpaLLM adds rounds until every layer is pruned.

    The number of clients limits them, and the server chooses that number.
    """
    bench.method = "fedspallm"
    site = OneSite(bench, {"max-rounds": 1}, num_clients=10**6)
    order = {"blocks": [0], "versions": [0, 0]}
    assert site.ask("train", fields=order).header.status == "ok"
    assert "max-rounds = 1: requested round = 2" in site.refusal("train", 2, order)
    assert "max-rounds = 1: requested round = 2" in site.refusal("deliver", 3, order)


def test_public_texts_are_bounded(bench: Bench) -> None:
    site = OneSite(bench, {"max-samples": 60}, data__num_samples=2, evaluation__max_samples=0)
    assert site.ask("train").header.status == "ok"
    texts = {name: list(range(16)) for name in ("a", "b")}
    fields = {"names": list(texts), "num_samples": [67, 67], "sequence_length": 16, "own_text": False, "test_metrics": [],
               "test_items": 0, "test_requests": 0, "test_tokens": 0}  # fmt: skip
    samples = {
        name: torch.tensor([tokens] * 67, dtype=torch.int32).numpy()
        for name, tokens in texts.items()
    }
    told = site.refusal("evaluate", 1, fields, blobs={"public-samples": save(samples)})
    assert "max-samples = 60: the public texts of evaluation.texts have 134 samples" in told


def test_all_limits_are_told_at_once(bench: Bench) -> None:
    node = {"max-steps": 3, "max-rounds": 1}
    told = OneSite(tuning(bench), node, threads=1000, training__accumulation=2).refusal("enrol")
    first, *others = [line.strip() for line in told.splitlines()[1:]]
    assert first.startswith("threads = 1000: at most ")
    assert others == [
        "max-steps = 3: training.steps x training.accumulation = 4",
        "max-rounds = 1: federation.rounds = 2",
    ]


def test_a_site_answers_so_many_runs(bench: Bench) -> None:
    site = OneSite(bench, {"max-runs": 2})
    assert [
        site.ask("train", lineage=named(lineage)).header.status for lineage in ("a", "b", "a")
    ] == ["ok"] * 3
    for kind in ("enrol", "train"):
        assert (
            "max-runs = 2: this number of runs was already answered within keep-days"
            in site.refusal(kind, lineage=named("c"))
        )
    assert (
        OneSite(bench, {"max-runs": 2, "site": "other"})
        .ask("train", lineage=named("c"))
        .header.status
        == "ok"
    )
    # Runs older than ``keep-days`` no longer count.
    os.utime(bench.folder / "state" / named("a") / "ward" / "lock", (0, 0))
    assert site.ask("enrol", 0, lineage=named("c")).header.status == "ok"
    assert site.ask("train", lineage=named("c")).header.status == "ok"


def test_repeated_size_probing_is_limited(bench: Bench) -> None:
    """A server that asks for ever more samples would learn how many there are.

    Each run that asks counts, regardless of the answer.
    """
    node = {"max-runs": 3}
    asked = {
        lineage: OneSite(bench, node, data__num_samples=number)
        for lineage, number in (("a", 2000), ("b", 2), ("c", 1000))
    }
    found = {
        lineage: site.ask("enrol", 0, lineage=named(lineage)).header.status
        for lineage, site in asked.items()
    }
    assert found == {"a": "failed", "b": "ok", "c": "failed"}
    assert "max-runs = 3: this number of runs was already answered" in asked["b"].refusal(
        "enrol", 0, lineage=named("d")
    )
    assert "too few samples" in asked["a"].refusal("enrol", 0, lineage=named("a"))
    # Other settings in the same run are refused too.
    told = OneSite(bench, node, data__num_samples=500).refusal("enrol", 0, lineage=named("a"))
    assert told.startswith("message: this site takes part in this run with another set of settings")
    assert asked["b"].ask("train", lineage=named("b")).header.status == "ok"


def test_disallowed_run_is_not_counted(bench: Bench) -> None:
    """The site refuses before it reads its data."""
    for lineage in ("a", "b", "c"):
        assert "threads = 1000" in OneSite(bench, {"max-runs": 1}, threads=1000).refusal(
            "enrol", 0, lineage=named(lineage)
        )
    assert OneSite(bench, {"max-runs": 1}).ask("enrol", 0, lineage=named("d")).header.status == "ok"


def test_a_partition_id_turns_no_limit_off(bench: Bench) -> None:
    node = {"partition-id": 0, "num-partitions": 2, "min-tokens": 0}
    assert "min-tokens = 2048" in OneSite(bench, node).refusal("train")
    assert "threads = 1000" in OneSite(bench, node, threads=1000).refusal("enrol")
    assert "threads = 100000: input should be less than" in OneSite(
        bench, node, threads=100_000
    ).refusal("enrol")


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

    def only_the_first(loop: Loop, step: int) -> float:
        loss = backward(loop, step)
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
@pytest.mark.parametrize("kind", ["train", "fetch", "deliver", "evaluate", "enrol"])
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
    reason = site.refusal("alone", 2, {"rank_limit": 0})
    assert reason.startswith(
        "min-tokens = 2048: the answer would be computed from fewer tokens; give the site more data"
    )
    assert "made nothing by itself" in site.evaluate({"a": list(range(16))}, 2).fields["reason"]


# ----- errors that are not an Exception -----------------------------------------------------------


class PanicException(BaseException):
    """Exception of a Rust library that panics, with the name that PyO3 gives it."""


def panic(*_: Any, **__: Any) -> Any:
    raise PanicException(SECRET)


def told_of_panic(reply: MessageBody) -> bool:
    return (
        reply.header.status == "failed"
        and "PanicException" in str(reply.fields)
        and SECRET not in str(reply.fields)
    )


@pytest.mark.parametrize("kind", ["enrol", "deliver", "train", "fetch", "alone", "evaluate"])
def test_a_panic_in_any_handler_is_an_answer(
    bench: Bench, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process survives and answers the next message."""
    site = OneSite(bench)
    with monkeypatch.context() as patched:
        patched.setattr(client_app.site, "contract_for", panic)
        assert told_of_panic(site.ask(kind))
    assert site.ask("train").header.status == "ok"


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (client_app.app, "read"),
        (client_app.policy.egress_check, "check_reply"),
        (client_app.policy.egress_check, "egress_log"),
    ],
)
def test_panic_outside_handlers_is_an_answer(
    bench: Bench, module: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, panic)
    assert told_of_panic(OneSite(bench).ask("train"))


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_ends_the_handler(
    bench: Bench, interrupt: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> Any:
        raise interrupt

    monkeypatch.setattr(client_app.site, "contract_for", interrupted)
    with pytest.raises(interrupt):
        OneSite(bench).ask("train")


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
