"""Equal results, drop-outs and resumption with each method that has secure sums."""

from typing import Any

import pytest
from flwr.app import Message

from espalier.messages.records import read
from tests.bench import Bench
from tests.federation.secure_sum.summed_methods import (
    FedSbSums,
    FedSodaSums,
    FedSpaLlmSums,
    FfaSums,
    FlapSums,
    LlmPrunerSums,
    RoloraSums,
    SftPSums,
    SliceGptSums,
)
from tests.methods.promises.federations import Uninterrupted
from tests.methods.promises.secure_sum_promises import (
    STEPS,
    UNMASKING,
    RoundedSumPromises,
    SecureSumPromises,
)

pytestmark = pytest.mark.slow


class TestFlap(FlapSums, SecureSumPromises):
    pass


class TestLlmPruner(LlmPrunerSums, SecureSumPromises):
    pass


class TestSliceGpt(SliceGptSums, RoundedSumPromises):
    def assert_equal_reports(self, found: dict[str, Any], expected: dict[str, Any]) -> None:
        """Assert that reports are equal up to rounding: the variance follows from the moments."""
        key = "explained_variance"
        assert found.pop(key) == pytest.approx(expected.pop(key), rel=1e-9)
        super().assert_equal_reports(found, expected)


class TestFedSpaLlm(FedSpaLlmSums, RoundedSumPromises):
    pass


class TestFedSoda(FedSodaSums, RoundedSumPromises):
    pass


class TestSftP(SftPSums, RoundedSumPromises):
    pass


class TestFedSb(FedSbSums, RoundedSumPromises):
    pass


class TestFfa(FfaSums, RoundedSumPromises):
    pass


def silent_after_round_1(request: Message, reply: Message) -> Message | None:
    """Drop the replies of a client from round 2 on (a tamper of ``InProcessGrid``)."""
    return reply if read(request.content).header.server_round < 2 else None


class TestRolora(RoloraSums, RoundedSumPromises):
    @pytest.mark.parametrize("step", STEPS)
    def test_a_client_may_drop_out_at_each_step(  # type: ignore[override]
        self, secure: Bench, secret_without: Uninterrupted, step: str
    ) -> None:
        """A client that drops out after the first masked sum is in that sum only."""
        expected = secret_without.folder
        if step in UNMASKING:
            grid = secure.grid()
            grid.tamper[2] = silent_after_round_1
            expected = secure.run(grid)
        self.assert_drop_out(secure, step, expected)
