"""Fed-SB (Singhal et al. 2025): federated averaging of the matrix between frozen LoRA factors.

With common A and B the mean of the matrices R_i is the mean of the updates B R_i A, exactly.
"""

from dataclasses import replace

from torch import Tensor

from espalier.hf.whole.inner_matrices import plain_tensors
from strategies.averaging.adapter_averager import Tuning
from strategies.averaging.adapters import AdapterResult
from strategies.averaging.written_adapters import WrittenAdapters


class InnerResult(AdapterResult):
    """Global matrices between the frozen factors."""

    def written(self) -> WrittenAdapters:
        """Return plain adapters, whose B is the product of the frozen B and the matrix."""

        def plain(key: str) -> dict[str, Tensor]:
            return plain_tensors(self.adapters, key, self.tensors(key))

        plan = replace(self.adapters, bases="")
        return replace(super().written(), adapters=plan, tensors=plain)


class FedSb(Tuning):
    """Strategy of Fed-SB: federated averaging of small matrices."""

    RESULT = InnerResult
    result: InnerResult
