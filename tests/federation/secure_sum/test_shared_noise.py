"""Noise that sites of a secure sum share: amount, record, and servers that want less of it."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import Message
from safetensors.numpy import load

from client_app.policy.site_policy import _against_shared_noise
from client_app.protocol.secure_sum import _require_enough_noise
from espalier.errors import InputError
from espalier.messages.message import MessageBody
from espalier.messages.records import address, read
from espalier.privacy.budget import Budget
from espalier.privacy.guarantee import guarantee_of
from espalier.privacy.noise import SeededBits
from espalier.results.finished_run import open_run
from espalier.results.report.verdict import verdict
from espalier.settings.run import parse
from pruning_kernels.fixed_point import from_words
from strategies.base.rounds import RunFailed
from tests.bench import Bench, Home, home, summary
from tests.methods.promises.secure_sum_promises import silent_from

pytest.importorskip("opacus", reason="needs the extra privacy")

SETTINGS: dict[str, Any] = {
    # So little that nothing but noise is seen.
    "privacy.epsilon": 0.05,
    "privacy.noise": "secure",
    "privacy.honest-fraction": 0.75,
    "federation.secure-sum": True,
    "federation.aggregation-rule": "mean",
}
INPUTS = 8
"""Inputs of the tiny model: four in each of two blocks."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Home:
    return home(tmp_path_factory.mktemp("home"))


@pytest.fixture
def bench(tmp_path: Path, shared: Home, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Return a bench of four sites, three of which a sum needs, and one of which is dishonest."""
    monkeypatch.setenv("ESPALIER_STATE_DIR", str(tmp_path / "state"))
    return Bench(tmp_path, "pooled-pruning", SETTINGS, home=shared)


def noise_of_sites(folder: Path) -> np.ndarray:
    """Return all numbers that each site keeps, (sites, numbers)."""
    found = []
    for site in sorted(folder.glob("state/*/node-*/r001")):
        blobs = [file for file in site.iterdir() if not file.name.endswith(".json")]
        numbers = [
            from_words(words, 40).numpy()
            for blob in sorted(blobs)
            for name, words in load(blob.read_bytes()).items()
            if name.endswith(".squares")
        ]
        found.append(np.concatenate(numbers))
    return np.array(found)


def test_sites_add_their_shares_and_the_run_says_on_whom_it_rests(bench: Bench) -> None:
    kept = []

    def look(message: Message) -> None:
        if read(message.content).header.kind == "unmask" and not kept:
            kept.append(noise_of_sites(bench.folder))

    grid = bench.grid()
    grid.before_push = look
    folder = bench.run(grid)
    guarantee = guarantee_of(parse(bench.config()))
    assert guarantee is not None
    whole = guarantee.draw.noise_multiplier
    assert guarantee.site_multiplier == pytest.approx(whole / 2**0.5)
    (noise,) = kept
    assert noise.shape[0] == 4
    tolerance = 6 / noise.shape[1] ** 0.5
    own = noise.std(axis=1) / (guarantee.site_multiplier * INPUTS**0.5)
    assert np.abs(own - 1).max() < tolerance
    # A sum that one site dropped out of, without the noise of a dishonest one.
    least = noise[:2].sum(axis=0).std() / (whole * INPUTS**0.5)
    assert abs(least - 1) < tolerance
    found = summary(folder)["privacy"]
    assert found == json.loads(json.dumps(guarantee.to_json()))
    assert found["shared_noise"] == {
        "honest_fraction": 0.75, "sites": 4, "dishonest": 1, "least_of_sum": 3,
    }  # fmt: skip
    (card,) = folder.glob("model/README.md")
    words = "works with at most 1 of the 4 sites"
    assert words in card.read_text()
    assert words in " ".join(verdict(open_run(folder), []))
    log = Budget(bench.folder / "state", "node-00000", 0.0, 1e-5)
    assert list(log.spent().draws.values()) == guarantee.draws
    assert '"honest_fraction": 0.75' in log.path.read_text().replace('":0', '": 0')


def test_a_sum_without_one_site_counts_and_without_two_nothing_is_unmasked(bench: Bench) -> None:
    for step in ("train", "masked"):
        grid = bench.grid()
        grid.tamper[2] = silent_from(step)
        clients = summary(bench.run(grid))["clients"]
        assert [one["status"] == "completed" for one in clients] == [True, True, False, True]
    grid = bench.grid()
    for client in (1, 2):
        grid.tamper[client] = silent_from("train")
    with pytest.raises(RunFailed, match="2 clients sent keys, a sum needs 3; nothing was unmasked"):
        bench.run(grid)


def test_a_server_with_other_settings_gets_no_tensor(bench: Bench) -> None:
    """It lowers the number of sites after they made their noise, or asks for plain tensors."""
    grid = bench.grid()
    reasons = dict[tuple[str, str], str]()

    def asked(body: MessageBody, **changes: Any) -> str:
        node, context = next(iter(grid.contexts.items()))
        before = dict(context.run_config)
        context.run_config |= {key.replace("__", "."): value for key, value in changes.items()}
        try:
            return str(read(grid.answer(address(body, node, 60.0), context).content).fields)
        finally:
            context.run_config.clear()
            context.run_config |= before

    def lie(message: Message) -> None:
        body = read(message.content)
        header = body.header
        if header.client or header.part:
            return
        if header.kind in ("shares", "masked", "confirm", "unmask"):
            fewer = {"num-clients": 3, "privacy__honest-fraction": 0.7}
            reasons[header.kind, "fewer"] = asked(body, **fewer)
        if header.kind == "shares":
            plain = {"federation__secure-sum": False, "privacy__honest-fraction": 0.0}
            train = header.model_copy(update={"kind": "train"})
            fetch = header.model_copy(update={"kind": "fetch", "part": 1})
            reasons["train", "plain"] = asked(MessageBody(train, {}), **plain)
            reasons["fetch", "plain"] = asked(
                MessageBody(fetch, {"blob_sha256": ["0" * 64]}), **plain
            )

    grid.before_push = lie
    assert summary(bench.run(grid))["status"] == "completed"
    assert len(reasons) == 6
    for reason in reasons.values():
        assert "takes part in this run with another set of settings" in reason, reasons


def order(threshold: int, clients: int) -> Any:
    sites = [f"site-{client}" for client in range(clients)]
    return SimpleNamespace(threshold=threshold, clients=list(range(clients)), sites=sites)


def test_a_site_refuses_lists_whose_sums_have_too_little_noise() -> None:
    run = parse(
        SETTINGS
        | {"method": "pooled-pruning", "num-clients": 8, "evaluation.local-baseline": False}
    )
    site: Any = SimpleNamespace(settings=run)
    names = [f"site-{client}" for client in range(8)]
    _require_enough_noise(site, order(6, 8), [])
    _require_enough_noise(site, order(6, 6), names)
    for wrong in (order(5, 7), order(3, 4), order(7, 9)):
        with pytest.raises(InputError, match="it needs 6 of num-clients = 8, to have enough noise"):
            _require_enough_noise(site, wrong, [])
    # A second sum with other sites: the difference to the first one would have little noise.
    with pytest.raises(InputError, match="site-5 was not among the sites that were listed first"):
        _require_enough_noise(site, order(6, 6), [*names[:5], "site-9"])


def test_a_site_relies_on_others_only_if_its_owner_says_so() -> None:
    def lines(**node: Any) -> list[str]:
        known = {"simulated": False, "max_honest_fraction": 0.0, "peer_keys": "", **node}
        site: Any = SimpleNamespace(
            node=SimpleNamespace(**known),
            settings=SimpleNamespace(privacy=SimpleNamespace(honest_fraction=0.75)),
        )
        return _against_shared_noise(site)

    assert [line.split(":")[0] for line in lines()] == [
        "max-honest-fraction = 0",
        "privacy.honest-fraction = 0.75",
    ]
    assert len(lines(max_honest_fraction=0.7, peer_keys="peers")) == 1
    assert not lines(max_honest_fraction=0.75, peer_keys="peers")
    assert not lines(simulated=True)


def test_a_sum_of_shares_has_the_distribution_of_one_noise() -> None:
    """Sixteen sites add a sixteenth of the variance each; compare quantiles with one noise."""
    number = 20_000
    one = SeededBits(0, 0, 1).grid_noise(number, 3.0)
    parts = sum(SeededBits(0, site, 1).grid_noise(number, 0.75) for site in range(1, 17))
    assert parts.dtype == np.int64
    both = np.sort(np.stack([one, parts]), axis=1)
    places = np.linspace(0, number - 1, 400).astype(int)
    steps = np.searchsorted(both[1], both[0][places]) - places
    # Kolmogorov and Smirnov: a right sum fails with a probability below 1e-9.
    assert np.abs(steps).max() / number < 3.3 * (2 / number) ** 0.5
