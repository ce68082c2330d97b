"""Log of a SuperNode.

It reports as whom the node is connected, or why it was refused. Other lines of Flower are shown
unchanged.
"""

import pytest
from flwr.supercore.error import ApiErrorCode
from flwr.supercore.error.catalog import API_ERROR_MAP

from espalier.flower.supernode import SupernodeLog, why_refused

REFUSED = [
    "ERROR :     Exit Code: 305",
    "Failed to initialize the connection to the SuperLink.",
    "[code: 2004] {}",
    "The SuperNode could not establish a connection to the SuperLink.",
]


def heard(lines: list[str], site: str = "hospital-a") -> list[str]:
    log = SupernodeLog(site, "server:9092", "a.key", "SHA256:abc")
    return [shown for line in lines for shown in log.heard(f"{line}\n")]


def test_connection_is_told_with_its_name() -> None:
    first, second = heard(["INFO :      SuperNode ID: 612"])
    assert first == "INFO :      SuperNode ID: 612"
    assert (
        second
        == "espalier: connected to server:9092 as hospital-a (node 612, with the key SHA256:abc);"
        " waiting for runs"
    )


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        (
            "Failed to activate SuperNode.",
            "does not know this node's key (a.key, SHA256:abc), or still counts a node with this",
        ),
        (
            "SuperNode authentication is enabled. All SuperNodes must be registered via the CLI.",
            "--auth-supernode-private-key",
        ),
        ("Something else.", "refused this node: Something else."),
    ],
)
def test_a_refusal_is_followed_by_a_sentence(reason: str, told: str) -> None:
    lines = [line.format(reason) for line in REFUSED]
    shown = heard(lines)
    assert [line for line in shown if line in lines] == lines
    (line,) = [line for line in shown if line not in lines]
    assert line.startswith("espalier: the SuperLink server:9092 ")
    assert told in line


@pytest.mark.parametrize(
    "code", ["FLEET_NODE_ACTIVATION_FAILED", "FLEET_SUPERNODE_REGISTRATION_DISABLED"]
)
def test_explained_reasons_are_given_by_flower(code: str) -> None:
    reason = API_ERROR_MAP[ApiErrorCode[code]].public_message
    assert "refused this node" not in why_refused(reason, SupernodeLog("a", "h:1", "a.key", ""))


def test_remedy_names_command_and_own_key() -> None:
    line = heard(["[code: 2004] Failed to activate SuperNode."])[1]
    assert "flwr supernode register hospital-a.key.pub CONNECTION" in line


def test_any_other_line_is_passed_on() -> None:
    lines = ["INFO : begins", "Traceback (most recent call last):", "ValueError: [code: 1] x"]
    assert heard(lines) == lines
