"""Secure sums of three sites with keys, in real processes."""

import json
from pathlib import Path

import pytest

from espalier.cli.keys import make_keys
from tests.bench import private_text
from tests.processes.deployment import espalier, federation
from tests.processes.interruptible_run import ROOT

pytestmark = [pytest.mark.processes, pytest.mark.slow]

SITES = ("hospital-a", "hospital-b", "hospital-c")
SETTINGS = (
    "pooled-pruning", "num-clients=3", "quorum=1.0", "data.num-samples=4",
    "data.sequence-length=64", "evaluation.max-samples=4", "evaluation.local-baseline=false",
    "evaluation.centralized=off", "--app", str(ROOT),
)  # fmt: skip


def node_config(folder: Path, public: Path) -> dict[str, str]:
    """Return the node-config of each site; it accepts secure sums of three sites only."""
    found = {}
    for number, site in enumerate(SITES):
        text = folder / f"{site}.txt"
        text.write_text(private_text(number))
        key = folder / "keys" / "sites" / site / f"{site}.key"
        found[site] = f'site-key="{key}" peer-keys="{public}" min-secure-sum=3 data-path="{text}"'
    return found


def test_signed_keys_give_the_sum_of_all_sites(tmp_path: Path) -> None:
    """Sites that accept nothing but secure sums give the masks of plain sums at the same sites."""
    list(make_keys(tmp_path / "keys", ["localhost"], SITES, 365))
    public = tmp_path / "keys" / "server" / "sites"
    config = node_config(tmp_path, public)
    plain_config = {site: words.replace("min-secure-sum=3", "") for site, words in config.items()}
    models = []
    for name, more, secret in (("secret", config, "true"), ("plain", plain_config, "false")):
        folder = tmp_path / name
        folder.mkdir()
        with federation(folder, SITES, more, warm=SITES) as running:
            done = espalier(
                folder, "run", *SETTINGS, f"federation.secure-sum={secret}", f"site-keys={public}",
                "--superlink", running.control,
            )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        (run,) = (folder / "runs").iterdir()
        summary = json.loads((run / "summary.json").read_text())
        assert [client["status"] for client in summary["clients"]] == ["completed"] * 3
        models.append((run / "model" / "model.safetensors").read_bytes())
        logs = "".join(file.read_text(errors="replace") for file in folder.glob("supernode-*.log"))
        assert "nothing shows that the keys" not in logs
    assert models[0] == models[1]
