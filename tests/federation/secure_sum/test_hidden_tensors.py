"""No tensor of a single client reaches the server, with each method that has secure sums."""

from pathlib import Path

from tests.bench import Bench, model_files
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
from tests.methods.promises.hidden_tensors import HiddenTensors


class TestFlap(FlapSums, HiddenTensors):
    pass


class TestLlmPruner(LlmPrunerSums, HiddenTensors):
    pass


class TestSliceGpt(SliceGptSums, HiddenTensors):
    pass


class TestFedSpaLlm(FedSpaLlmSums, HiddenTensors):
    def allowed(self, bench: Bench, folder: Path) -> bytes:
        """Return the bytes of the base model and of the result.

        SparseGPT leaves the first weights of a row as they are, and the result has stretches of
        masks that clients share.
        """
        base = (bench.model / "model.safetensors").read_bytes()
        return base + b"".join(model_files(folder).values())


class TestFedSoda(FedSodaSums, HiddenTensors):
    pass


class TestSftP(SftPSums, HiddenTensors):
    pass


class TestFedSb(FedSbSums, HiddenTensors):
    pass


class TestFfa(FfaSums, HiddenTensors):
    pass


class TestRolora(RoloraSums, HiddenTensors):
    pass
