"""Private runs from end to end: what leaves, what is drawn, and what is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message
from safetensors.numpy import load

from client_app.node.check_node import look
from espalier.errors import EspalierError
from espalier.messages.message import Header
from espalier.messages.records import read, write
from espalier.privacy.accounting import Draw, epsilon_of
from espalier.privacy.budget import Budget
from espalier.privacy.guarantee import Guarantee, guarantee_of
from espalier.results.finished_run import open_run
from espalier.results.report.verdict import verdict
from espalier.settings.run import parse
from pruning_kernels.fixed_point import from_words
from strategies.base.rounds import RunFailed
from tests.bench import Bench, Home, Killed, home, model_files, summary
from tests.in_process import InProcessGrid

pytest.importorskip("opacus", reason="needs the extra privacy")

PRIVATE = {"privacy.epsilon": 4.0, "privacy.noise": "seed"}
TUNING = {
    "federation.rounds": 2, "training.steps": 2, "training.batch-size": 2,
    "training.learning-rate": 0.01, "lora.rank": 2, "lora.alpha": 4.0,
    "federation.client-weights": "equal", "privacy.sampling-rate": 0.3,
}  # fmt: skip
METHODS: dict[str, dict[str, Any]] = {"pooled-pruning": PRIVATE, "fedpetuning": PRIVATE | TUNING}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Home:
    return home(tmp_path_factory.mktemp("home"))


@pytest.fixture(params=list(METHODS))
def bench(
    request: pytest.FixtureRequest, tmp_path: Path, shared: Home, monkeypatch: pytest.MonkeyPatch
) -> Bench:
    monkeypatch.setenv("ESPALIER_STATE_DIR", str(tmp_path / "state"))
    return Bench(tmp_path, request.param, METHODS[request.param], num_clients=2, home=shared)


def answers_of(bench: Bench) -> int:
    return bench.settings.get("federation.rounds", 1)


def budget(tmp_path: Path, client: int = 0) -> Budget:
    return Budget(tmp_path / "state", f"node-{client:05d}", 0.0, 1e-5)


def replies(grid: InProcessGrid) -> list[tuple[int, int, bytes]]:
    """Return client, round and the bytes of all blobs of each ``train`` and ``fetch`` reply."""
    return [
        (body.header.client, body.header.server_round, b"".join(body.blobs.values()))
        for body in (read(message.content) for _, message in grid.received)
        if body.header.kind in ("train", "fetch") and body.blobs
    ]


def test_a_run_states_its_guarantee(bench: Bench, tmp_path: Path) -> None:
    grid = bench.grid()
    folder = bench.run(grid)
    found = summary(folder)
    assert found["status"] == "completed"
    guarantee = guarantee_of(parse(bench.config()))
    assert guarantee is not None
    assert found["privacy"] == json.loads(json.dumps(guarantee.to_json()))
    assert 3.8 < found["privacy"]["epsilon"] <= 4
    (card,) = (*folder.glob("model/README.md"), *folder.glob("adapter/README.md"))
    assert f"epsilon {found['privacy']['epsilon']:.3g} at delta 1e-05" in card.read_text()
    assert "protects nothing" in card.read_text()
    (sentence,) = (one for one in verdict(open_run(folder), []) if "privacy" in one)
    assert f"epsilon {found['privacy']['epsilon']:.3g} at delta 1e-05" in sentence
    for client in (0, 1):
        spent = budget(tmp_path, client).spent()
        assert len(spent.draws) == len(spent.answered) == answers_of(bench)
        assert epsilon_of(spent.draws.values(), 1e-5) == found["privacy"]["epsilon"]
    for body in (read(message.content) for _, message in grid.received):
        if body.header.kind == "train":
            assert body.fields["seconds"] == 0
            assert body.fields.get("samples", 0) == body.fields.get("skipped_steps", 0) == 0
        assert body.header.kind in ("enrol", "train", "fetch", "push", "refused")


def test_noise_of_the_seed_repeats_and_secure_noise_does_not(bench: Bench) -> None:
    def files(**changes: Any) -> tuple[list[tuple[int, int, bytes]], dict[str, bytes]]:
        grid = bench.grid(**changes)
        found = model_files(bench.run(grid, **changes))
        return replies(grid), found

    assert files() == files()
    one, other = (files(privacy__noise="secure")[0] for _ in range(2))
    assert [reply[:2] for reply in one] == [reply[:2] for reply in other]
    assert all(mine[2] != theirs[2] for mine, theirs in zip(one, other, strict=True))


def test_the_sums_differ_from_exact_ones_by_noise(tmp_path: Path, shared: Home) -> None:
    """With more epsilon the replies come closer to those of another noise."""
    spread = []
    for epsilon in (1.0, 32.0):
        found = []
        for seed in (1, 2):
            folder = tmp_path / f"{epsilon}-{seed}"
            folder.mkdir()
            settings = PRIVATE | {"seed": seed, "privacy.epsilon": epsilon}
            bench = Bench(folder, "pooled-pruning", settings, 1, home=shared)
            grid = bench.grid()
            grid.contexts[1000].node_config["state-dir"] = str(folder / "state")
            bench.run(grid)
            found += [
                from_words(load(blob)["attn.q.squares"], 40)
                for _, message in grid.received
                for blob in read(message.content).blobs.values()
            ]
        one, other = (torch.cat([*found[half : half + 2]]) for half in (0, 2))
        spread.append(float((one - other).std()))
    assert spread[0] > 8 * spread[1] > 0


def test_killed_and_resumed_sends_the_same_and_draws_once(bench: Bench, tmp_path: Path) -> None:
    """The second server asks again for what the first one had been sent."""
    last = answers_of(bench)
    parts = 2 if bench.method == "pooled-pruning" else 1

    def when(header: Header) -> bool:
        return (header.kind, header.client, header.server_round) == ("train", 1, last)

    changes = {"privacy__noise": "secure"}
    grid = bench.grid(**changes)
    folder = bench.killed(when, grid, **changes)
    before = dict.fromkeys(replies(grid))
    grid.before_push = lambda _: None
    resumed = changes | {"resume_from": str(folder)}
    bench.run(grid, **resumed)
    after = replies(grid)
    sent = before.keys() | set(after)
    for client in (0, 1):
        spent = budget(tmp_path, client)
        assert len(spent.spent().draws) == last
        assert spent.path.read_text().count('"draw"') == last
        for place in range(1, last + 1):
            # One message for each part of the reply: no other content was ever sent.
            assert len({reply for reply in sent if reply[:2] == (client, place)}) == parts
    assert set(before) & set(after)


def test_a_lost_answer_is_not_given_again(bench: Bench, tmp_path: Path) -> None:
    """Whoever deletes the stored answer does not get a second one with other noise."""
    grid = bench.grid()
    orders: list[Message] = []
    grid.before_push = lambda message: (
        orders.append(message) if read(message.content).header.kind == "train" else None
    )
    bench.run(grid)
    last = [one for one in orders if read(one.content).header.client == 0][-1]
    body = read(last.content)
    (context,) = (one for one in grid.contexts.values() if one.node_config["partition-id"] == 0)
    again = Message(write(body), dst_node_id=1000, message_type="train")
    for folder in (tmp_path / "state").glob(f"*/node-00000/r{body.header.server_round:03d}"):
        shutil.rmtree(folder)
    drawn = budget(tmp_path).path.read_text()
    reply = read(grid.answer(again, context).content)
    assert reply.header.status == "failed"
    assert "stored answer is gone" in reply.fields["reason"]
    assert budget(tmp_path).path.read_text() == drawn


def test_work_that_failed_is_repeated_without_another_draw(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that is killed after the draw and before the answer is stored."""
    place = {
        "pooled-pruning": "client_app.methods.private.sums.PrivateSums.blobs",
        "fedpetuning": "client_app.methods.private.tuning.PrivateSteps.run",
    }[bench.method]

    def killed(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(place, killed)
        with pytest.raises(Killed):
            bench.run()
    spent = budget(tmp_path).spent()
    assert (len(spent.draws), len(spent.answered)) == (1, 0)
    (folder,) = bench.runs()
    assert summary(bench.run(resume_from=str(folder)))["status"] == "completed"
    assert len(budget(tmp_path).spent().draws) == answers_of(bench)


# ----- refusal ------------------------------------------------------------------------------------


def test_a_site_refuses_a_run_beyond_its_budget(bench: Bench, tmp_path: Path) -> None:
    """The first run fits, the second does not, and says so before anything is computed."""
    grid = bench.grid()
    for context in grid.contexts.values():
        context.node_config |= {"max-epsilon": 5.0, "delta": 1e-5}
    assert summary(bench.run(grid))["status"] == "completed"
    spent = budget(tmp_path).path.read_text()
    second = bench.grid(seed=1)
    for context in second.contexts.values():
        context.node_config |= {"max-epsilon": 5.0, "delta": 1e-5}
    with pytest.raises(RunFailed, match=r"max-epsilon = 5 \(delta = 1e-05\): earlier runs have"):
        bench.run(second, seed=1)
    assert budget(tmp_path).path.read_text() == spent


@pytest.mark.parametrize("method", ["pooled-pruning"])
def test_a_site_with_a_budget_refuses_runs_without_privacy(
    tmp_path: Path, shared: Home, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ESPALIER_STATE_DIR", str(tmp_path / "state"))
    bench = Bench(tmp_path, method, {}, num_clients=1, home=shared)
    grid = bench.grid()
    for context in grid.contexts.values():
        context.node_config["max-epsilon"] = 8.0
    with pytest.raises(RunFailed, match="max-epsilon = 8: the run is not differentially"):
        bench.run(grid)


def node_of(bench: Bench, **more: Any) -> dict[str, Any]:
    return {
        "site": "site-a",
        "data-path": str(bench.folder / "text-0.txt"),
        "model-path": str(bench.model),
        "state-dir": str(bench.folder / "own"),
        "min-tokens": 1,
        **more,
    }


def test_check_node_tells_what_a_run_would_draw(bench: Bench) -> None:
    run = bench.config(privacy__noise="secure")
    node = node_of(bench, **{"max-epsilon": 4.1})
    (line,) = (line for line in look(node, run) if "max-epsilon" in line)
    after = float(line.rpartition(" ")[2])
    assert "max-epsilon: at most 4.1; at delta = 1e-05 spent 0.000, after this run" in line
    assert 3.8 < after <= 4
    earlier = Guarantee(Draw(3.0, 1.0, 1), 1, 1e-5, "secure")
    Budget(bench.folder / "own", "site-a", 0, 1e-5).draw("earlier", 1, earlier)
    with pytest.raises(
        EspalierError, match=r"max-epsilon = 4\.1 .*: earlier runs have spent 1\.2\d+, a"
    ):
        list(look(node, run))


def test_a_real_site_refuses_noise_of_the_seed(bench: Bench) -> None:
    with pytest.raises(EspalierError, match=r"privacy\.noise = 'seed': everybody who knows"):
        list(look(node_of(bench), bench.config()))


def test_a_server_that_asks_for_more_gets_nothing(bench: Bench) -> None:
    """Local baselines and evaluations have no noise, so a private run answers neither."""
    grid = bench.grid()
    orders: list[Message] = []
    grid.before_push = orders.append
    bench.run(grid)
    (first,) = (
        body for body in (read(one.content) for one in orders)
        if body.header.kind == "train" and (body.header.client, body.header.server_round) == (0, 1)
    )  # fmt: skip
    (context,) = (one for one in grid.contexts.values() if one.node_config["partition-id"] == 0)
    for kind in ("local_baseline", "evaluate"):
        body = type(first)(first.header.model_copy(update={"kind": kind}), dict(first.fields))
        kinds = {"local_baseline": "train.local_baseline", "evaluate": "evaluate"}
        message = Message(write(body), dst_node_id=1000, message_type=kinds[kind])
        reply = read(grid.answer(message, context).content)
        assert reply.header.status == "failed"
        assert f"{kind} has no answer with noise" in reply.fields["reason"]


@pytest.mark.parametrize("method", list(METHODS))
def test_noisy_answers_can_be_summed_secretly(
    method: str, tmp_path: Path, shared: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sum of noisy sums is exact; adapters are rounded to the summands' fixed point."""
    monkeypatch.setenv("ESPALIER_STATE_DIR", str(tmp_path / "state"))
    settings = METHODS[method] | {"federation.aggregation-rule": "mean"}
    three = Bench(tmp_path, method, settings, num_clients=3, home=shared)
    plain = model_files(three.run())
    secret = model_files(three.run(federation__secure_sum=True))
    if method == "pooled-pruning":
        assert secret == plain
        return
    (name,) = (name for name in plain if name.endswith("adapter_model.safetensors"))
    for key, values in load(plain[name]).items():
        torch.testing.assert_close(
            torch.from_numpy(load(secret[name])[key]), torch.from_numpy(values), rtol=0, atol=1e-6
        )
