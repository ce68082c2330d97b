"""Refusals of real sites: runs that would read or learn more than the owner allows.

Each test reproduces an attack that once worked. The nodes answer in this process but are not
simulated. Requests are handmade, as those of a malicious server.

"""

import json
from types import ModuleType
from typing import Any

import pytest

import client_app.app
import client_app.policy.egress_check
import client_app.site
from espalier.messages.message import MessageBody
from tests.bench import Bench, private_text
from tests.federation.sites.one_site import OneSite, tuning
from tests.run_names import named

SECRET = "the-patient-s-name"


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
    assert told == (
        "data-path: this site's data cannot be used for this run; the node's log gives the reason"
    )
    assert SECRET in caplog.text


def test_numbers_of_lines_do_not_leave_either(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    file = bench.folder / "records.jsonl"
    file.write_text('{"text": "a"}\n' * 6 + "[]\n")
    told = OneSite(bench, {"data-path": str(file)}).refusal("train")
    assert told == (
        "data-path: this site's data cannot be used for this run; the node's log gives the reason"
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


@pytest.mark.parametrize("kind", ["enrol", "push", "train", "fetch", "local_baseline", "evaluate"])
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
