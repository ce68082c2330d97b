"""Equal results, drop-outs and resumption with each method that has secure sums."""

import pytest

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
from tests.methods.promises.secure_sum_promises import RoundedSumPromises, SecureSumPromises

pytestmark = pytest.mark.slow


class TestFlap(FlapSums, SecureSumPromises):
    pass


class TestLlmPruner(LlmPrunerSums, SecureSumPromises):
    pass


class TestSliceGpt(SliceGptSums, RoundedSumPromises):
    pass


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


class TestRolora(RoloraSums, RoundedSumPromises):
    pass
