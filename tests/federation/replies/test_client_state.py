"""Client state that one round leaves for the next."""

from pathlib import Path

import torch

from client_app.protocol import client_state
from client_app.protocol.client_state import CONDITIONING, FEEDBACK
from espalier.storage.client_state import PrivateState


def left(state: PrivateState, document: str, server_round: int) -> dict[str, float]:
    return {
        key: block["x"].item()
        for key, block in client_state.before(state, document, server_round).items()
    }


def test_round_starts_from_previous_state(
    tmp_path: Path,
) -> None:
    state = PrivateState(tmp_path, "run", "site", {"number": 0})
    assert left(state, FEEDBACK, 1) == {}
    # The client does not take part in rounds 3 and 4.
    for server_round in (1, 2, 2, 5, 5):
        for document, shift in ((FEEDBACK, 0.0), (CONDITIONING, 10.0)):
            client_state.keep(
                state, document, server_round, {"block": {"x": torch.tensor(server_round + shift)}}
            )
        assert (
            left(state, FEEDBACK, server_round)
            == {1: {}, 2: {"block": 1.0}, 5: {"block": 2.0}}[server_round]
        )
        assert left(state, CONDITIONING, server_round + 1) == {"block": server_round + 10.0}
    assert len(list(state.lasting().root.glob("*.blob"))) == 4
