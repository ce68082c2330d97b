"""``espalier check-node``: its answers, its options and its exit code."""

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from client_app.node.check_node import look
from client_app.node.check_node import main as check
from espalier.cli.command import main
from espalier.cli.keys import make_keys
from espalier.errors import EspalierError
from espalier.flower.programs import read_node_config
from espalier.progress import Throttle
from server_app.estimate.node_fit import main as fit
from tests.bench import DEFAULTS, flatten, private_text
from tests.tiny_model import save_tiny_llama

APP = Path(__file__).parents[3]


@pytest.fixture
def run(tmp_path: Path) -> dict[str, Any]:
    changes = {
        "model": str(save_tiny_llama(tmp_path / "model")),
        "threads": 1,
        "data.num-samples": 2,
        "data.sequence-length": 16,
    }
    return flatten(DEFAULTS) | changes | {"evaluation.sequence-length": 16}


@pytest.fixture
def node(tmp_path: Path, run: dict[str, Any]) -> dict[str, Any]:
    (tmp_path / "notes.txt").write_text(private_text(0))
    own = {
        "data-path": str(tmp_path / "notes.txt"),
        "model-path": run["model"],
        "state-dir": str(tmp_path / "state"),
    }
    return {"site": "hospital-a", "min-tokens": 1, **own}


def test_it_says_what_it_found(
    run: dict[str, Any], node: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert check({"node": node, "run": run}) == 0
    shown = capsys.readouterr().out
    for found in (
        "hospital-a",
        node["data-path"],
        f"{run['model']}: llama, 2 blocks",
        "2 calibration samples of 16 tokens",
    ):
        assert found in shown
    assert Path(node["state-dir"]).is_dir()


def test_what_takes_long_is_told_as_it_goes(
    run: dict[str, Any],
    node: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "client_app.node.check_node.Throttle", lambda say: Throttle(say, lambda: 0.0, every=0.0)
    )
    assert check({"node": node, "run": run}) == 0
    shown = capsys.readouterr()
    assert "           reading notes.txt: 100%, 0 s left  [0 s]" in shown.err.splitlines()
    assert "reading" not in shown.out


def test_held_out_passages_are_not_trained_on(run: dict[str, Any], node: dict[str, Any]) -> None:
    lines = [line.strip() for line in look(node, run | {"method": "fedpetuning", "lora.rank": 2})]
    digests = {
        passage: hashlib.sha256(" ".join(passage.split()).encode()).digest()
        for passage in private_text(0).split("\n\n")
    }
    own = [
        passage
        for passage, digest in digests.items()
        if int.from_bytes(digest[:8], "big") % 100 >= 10
    ]
    tokens = AutoTokenizer.from_pretrained(run["model"])("\n\n".join(own))["input_ids"]
    assert f"{len(tokens) // 16} training sequences of 16 tokens" in lines


def test_limits_and_findings_are_told(
    run: dict[str, Any], node: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    limits = {
        "max-rounds": 7,
        "allowed-methods": "fedpetuning,fedprllm",
        "require-approval": "tensors",
        "own-text": True,
    }
    assert (
        check({"node": node | limits, "run": run | {"method": "fedpetuning", "lora.rank": 2}}) == 0
    )
    shown = capsys.readouterr().out
    for found in (
        "methods fedpetuning,fedprllm; the run's is fedpetuning",
        "max-rounds 7; federation.rounds = ",
        "max-steps 10,000; training.steps",
        "max-runs 100 within 30 days; 0 so far",
        "an answer needs at least 1 token; losses on own text may leave",
        "require-approval: replies with tensors need approval",
        "min-secure-sum: no minimum; the run has no secure sum",
        "peer-keys: none",
        f"on cpu, 1 thread of {os.cpu_count()} processors",
        "memory of this machine",
    ):
        assert found in shown


def test_demands_on_secure_sums_are_told(
    run: dict[str, Any],
    node: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    summed = {"method": "pooled-pruning", "num-clients": 5, "federation.secure-sum": True}
    asked = run | summed | {"data.sequence-length": 16, "evaluation.local-baseline": False}
    assert check({"node": node | {"min-secure-sum": 4}, "run": asked}) == 0
    shown = capsys.readouterr().out
    assert "min-secure-sum: 4; the run has a sum of 5" in shown
    assert "peer-keys: none, so a server that replaces keys could read this site's" in shown
    list(make_keys(tmp_path / "keys", ["localhost"], ("site-b", "site-c"), 365))
    peers = {"peer-keys": str(tmp_path / "keys" / "server" / "sites")}
    assert check({"node": node | peers, "run": asked}) == 0
    assert "peer-keys: 2 other sites: site-b, site-c" in capsys.readouterr().out
    assert check({"node": node | {"min-secure-sum": 6}, "run": asked}) == 2
    assert "min-secure-sum = 6: the sum of a round has 5 clients" in capsys.readouterr().err


def test_it_says_what_a_run_would_send(
    run: dict[str, Any], node: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """The query matrices of both blocks are 16 x 16.

    A and B of rank 2 have 64 values of 4 bytes together.
    """
    tuned = {
        "method": "fedpetuning",
        "lora.rank": 2,
        "lora.targets": "attn.q",
        "federation.rounds": 3,
        "part-bytes": 1024,
    }
    assert fit({"node": node, "run": run | tuned}) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    (row,) = [line for line in lines if line.startswith("train of rounds 1-3 ")]
    assert row.split()[4:11] == ["512", "each", "2", "lora_a", "(F32),", "2", "lora_b"]
    assert row.endswith("seconds, blob_sha256, samples, skipped_steps, rank")
    assert (
        "in 3 rounds 1,536 bytes of tensors, and some kilobytes of headers and hashes per message"
        in lines
    )
    assert any(
        line.startswith("train of rounds 1-3: Adapters trained on this client's data")
        for line in lines
    )
    assert [
        line.split()[0]
        for line in lines
        if line.startswith(("enrol ", "local_baseline ", "evaluate "))
    ] == ["enrol", "local_baseline", "evaluate"]


def test_server_s_choices_are_told_as_bounds(
    run: dict[str, Any], node: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert fit({"node": node, "run": run | {"method": "fedspallm"}}) == 0
    shown = capsys.readouterr().out
    assert "in 1 round at most " in shown
    assert (
        f"{2 + run['num-clients']} more rounds while work remains; max-rounds limits them" in shown
    )


@pytest.mark.parametrize("key", ["state-dir", "models-dir"])
def test_unwritable_directory_is_told(
    run: dict[str, Any], node: dict[str, Any], capsys: pytest.CaptureFixture[str], key: str
) -> None:
    assert check({"node": node | {key: "/proc/self/task"}, "run": run}) == 2
    assert f"{key} = '/proc/self/task': " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("node_changes", "run_changes", "words"),
    [
        ({"data-pth": "x"}, {}, "data-pth: unknown key; did you mean 'data-path'?"),
        ({"data-path": "/no/such"}, {}, "data-path = '/no/such': does not exist on this node"),
        (
            {},
            {"data.num-samples": 4000},
            "samples of 16 tokens, but data.num-samples = 4000 are needed",
        ),
        ({}, {"data.num-samples": 5000}, "max-samples = 4096: data.num-samples = 5000"),
        (
            {"min-tokens": 33},
            {},
            "min-tokens = 33: the answer would be computed from fewer tokens",
        ),
        ({"min-groups": 2}, {}, "min-groups = 2: needs data-path and data-group"),
        ({"threads": -1}, {}, "threads = -1"),
        ({}, {"data.sequence-length": 65}, "data.sequence-length = 65: the model has 64 positions"),
        ({}, {"evaluation.own-text": True}, "evaluation.own-text: this site does not allow it"),
        ({}, {"method": "hetlora", "lora.targets": "attn.z"}, "attn.z"),
        ({}, {"method": "fedprlm"}, "method = 'fedprlm'"),
    ],
)
def test_refusals_are_told_with_an_exit_code(
    run: dict[str, Any], node: dict[str, Any], capsys: pytest.CaptureFixture[str],
    node_changes: dict[str, Any], run_changes: dict[str, Any], words: str,
) -> None:  # fmt: skip
    assert check({"node": node | node_changes, "run": run | run_changes}) == 2
    assert words in capsys.readouterr().err


def test_a_model_path_is_opened(run: dict[str, Any], node: dict[str, Any], tmp_path: Path) -> None:
    other = Path(shutil.copytree(run["model"], tmp_path / "other"))
    (other / "model.safetensors").unlink()
    with pytest.raises(EspalierError, match="other"):
        list(look(node | {"model-path": str(other)}, run))


# ----- options of the command ---------------------------------------------------------------------


def test_site_without_base_model_is_checked(
    run: dict[str, Any], node: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """The run's server sends the model and its tokenizer."""
    own = {key: value for key, value in node.items() if key != "model-path"} | {
        "max-model-bytes": 10**6
    }
    assert check({"node": own, "run": run | {"method": "fedsoda"}}) == 0
    shown = capsys.readouterr().out
    assert "model      sent by the run's server" in shown
    assert own["data-path"] in shown
    assert fit({"node": own, "run": run | {"method": "fedsoda", "lora.rank": 2}}) == 0
    shown = capsys.readouterr().out
    assert "the number of bytes is not known before the server has sent the model" in shown
    for kind in ("enrol", "push", "train", "local_baseline", "evaluate"):
        assert f"  {kind}" in shown
    missing = own | {"data-path": str(Path(own["data-path"]).parent / "none.txt")}
    assert check({"node": missing, "run": run | {"method": "fedsoda"}}) == 2
    Path(own["data-path"]).write_text("\n\n  \n")
    assert check({"node": own, "run": run | {"method": "fedsoda"}}) == 2
    assert "the file is empty" in capsys.readouterr().err


def test_node_configuration_is_read_as_by_flower(tmp_path: Path) -> None:
    given = (
        'site="hospital-a" data-path="/data/my notes.txt" num-samples=16 own-text=true'
        " capability=1.5"
    )
    expected = {
        "site": "hospital-a",
        "data-path": "/data/my notes.txt",
        "num-samples": 16,
        "own-text": True,
        "capability": 1.5,
    }
    assert read_node_config(given) == expected
    file = tmp_path / "node.toml"
    file.write_text('site = "hospital-a"\n')
    assert read_node_config(str(file)) == {"site": "hospital-a"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("site=hospital-a", "Flower cannot read it; .* a string in quotes"),
        ('site="a" data-path', "'data-path' is not key=value, and Flower would ignore it"),
        ('site = "a"', "'site = \"a\"' is not key=value"),
        ("/no/such.toml", "/no/such.toml: cannot be read"),
    ],
)
def test_what_flower_would_not_read_is_told(given: str, words: str) -> None:
    with pytest.raises(EspalierError, match=words):
        read_node_config(given)


def test_an_interrupt_speaks_of_the_node(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_in_app(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("espalier.cli.app_commands.run_in_app", run_in_app)
    assert main(["check-node", 'site="a"', "--app", str(APP)]) == 130
    assert (
        capsys.readouterr().err == "\nespalier: interrupted; the check of the node is incomplete\n"
    )


def test_preset_settings_and_code_are_passed_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []

    def run_in_app(app: Path, module: str, document: Any) -> int:
        asked.append((app, module, document))
        return 2

    monkeypatch.setattr("espalier.cli.app_commands.run_in_app", run_in_app)
    assert (
        main(["check-node", 'site="a"', "fedspallm", "pruning.sparsity=0.7", "--app", str(APP)])
        == 2
    )
    ((app, module, document),) = asked
    assert (app, module, document["node"]) == (APP, "client_app.node.check_node", {"site": "a"})
    assert document["run"]["pruning.sparsity"] == 0.7
    assert (
        main(["check-node", 'site="a"', "fedspallm", "pruning.sparsity=1.7", "--app", str(APP)])
        == 2
    )
    # The settings of the run are wrong, so no node is asked.
    assert len(asked) == 1
