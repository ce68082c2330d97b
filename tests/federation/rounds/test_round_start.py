"""Adapters that a round of tuning begins with: those of the ordered model, and all of them."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from client_app.methods.tuning.round_adapters import begins_with
from espalier.errors import EspalierError
from espalier.messages.tensor_blobs import NUMPY_DTYPES, pack_tensors
from espalier.methods.examples import PLAN
from espalier.methods.tuning.adapters.tensors import blob_specs, trained
from espalier.settings.run import parse


@pytest.mark.parametrize("method", ["fedpetuning", "fedspine"])
def test_parts_of_another_cut_are_named(method: str) -> None:
    """A part has one structure, and the order that follows has another one or none."""
    settings = parse({"method": method, "lora.rank": 2})
    adapters = trained(PLAN, settings)
    site = SimpleNamespace(settings=settings)
    specs: Any = blob_specs(adapters, settings)
    blobs = {
        key: pack_tensors(
            {name: np.zeros(spec.shape, NUMPY_DTYPES[spec.dtype]) for name, spec in of_blob.items()}
        )
        for key, of_blob in specs.items()
    }
    first = sorted(blobs)[0]
    lacking = {key: blob for key, blob in blobs.items() if key != first}
    with pytest.raises(EspalierError, match=f"{first} were not sent to this client"):
        begins_with(site, adapters, lacking)  # type: ignore[arg-type]
    fewer = {
        name: np.zeros(spec.shape, np.float32) for name, spec in list(specs[first].items())[1:]
    }
    smaller = {
        name: np.zeros((1, *spec.shape[1:]), np.float32) for name, spec in specs[first].items()
    }
    for tensors in (fewer, smaller, {}):
        with pytest.raises(EspalierError, match=f"{first} are those of another model"):
            begins_with(site, adapters, blobs | {first: pack_tensors(tensors)})  # type: ignore[arg-type]
