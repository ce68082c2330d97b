"""Log of a SuperNode.

It reports as whom the node is connected, or why it was refused. Other lines of Flower are shown
unchanged.
"""

import pytest

from espalier.flower.supernode_log import SupernodeLog

TRACEBACK = [
    "Traceback (most recent call last):",
    '  File "flower_supernode.py", line 102, in flower_supernode',
    "    start_client_internal(",
]
REFUSED = [
    "ERROR :     <_InactiveRpcError of RPC that terminated with:",
    "\tstatus = StatusCode.FAILED_PRECONDITION",
    '\tdetails = "{}"',
    ">",
    *TRACEBACK,
    "RuntimeError: generator didn't yield",
]


def heard(lines: list[str], site: str = "hospital-a") -> list[str]:
    log = SupernodeLog(site, "server:9092", "a.key", "SHA256:abc")
    return [shown for line in lines for shown in log.heard(f"{line}\n")] + log.rest()


def test_it_is_said_that_it_is_connected_and_as_whom() -> None:
    first, second = heard(["INFO :      SuperNode ID: 612"])
    assert first == "INFO :      SuperNode ID: 612"
    assert (
        second
        == "espalier: connected to server:9092 as hospital-a (node 612, with the key SHA256:abc);"
        " waiting for runs"
    )


@pytest.mark.parametrize(
    ("details", "told"),
    [
        (
            "No SuperNode found with the given public key.",
            "does not know this node's key (a.key, SHA256:abc); register it there once",
        ),
        (
            "SuperNode authentication is enabled. All SuperNodes must be registered via the CLI.",
            "--auth-supernode-private-key",
        ),
        (
            "SuperNode with node ID 7 could not be activated.",
            "still counts a node with this key as connected",
        ),
        ("something else", "refused this node: something else"),
    ],
)
def test_a_refusal_is_one_sentence_and_no_traceback(details: str, told: str) -> None:
    (line,) = heard([line.format(details) for line in REFUSED])
    assert line.startswith("espalier: the SuperLink server:9092 ")
    assert told in line


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        (
            "[code: 2001] SuperNode authentication is enabled. All SuperNodes must be registered"
            " via the CLI.",
            ["--auth-supernode-private-key"],
        ),
        (
            "[code: 2004] Failed to activate SuperNode.",
            ["does not know this node's key", "or the SuperLink server:9092 still counts a node"],
        ),
    ],
)
def test_a_refusal_of_later_releases_is_explained(reason: str, told: list[str]) -> None:
    began, ended = "ERROR : Exit Code: 305", "For more information, visit: <https://flower.ai>"
    first, second, *explained, last = heard([began, reason, ended])
    assert (first, second, last) == (began, reason, ended)
    assert all(words in "".join(explained) for words in told)


def test_the_remedy_names_the_command_with_the_site_s_own_key() -> None:
    (line,) = heard(
        [line.format("No SuperNode found with the given public key.") for line in REFUSED]
    )
    assert line.endswith("flwr supernode register hospital-a.key.pub CONNECTION")


def test_any_other_error_is_passed_on_whole() -> None:
    lines = ["INFO : begins", *TRACEBACK, "ValueError: of another kind", "INFO : goes on"]
    assert heard(lines) == lines
    torn = [
        "ERROR : <_InactiveRpcError of RPC that terminated with:",
        "\tstatus = StatusCode.UNAVAILABLE",
    ]
    assert heard(torn) == torn
