"""Initial values of a run's trained parameters.

Every party computes the same values from the run's seed and the model, so they are never sent.
"""

import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.whole.frozen_bases import with_bases
from espalier.hf.whole.full_tensors import stored_values
from espalier.hf.whole.model import first_head
from espalier.models.adapters import HEAD_KEY, AdapterPlan
from espalier.models.plan import block_key
from espalier.seeds import derive_seed

HEAD_SEED = "head"
"""Purpose from which the seed of a new classification head is derived."""


def initial_adapters(adapters: AdapterPlan, seed: int) -> dict[str, dict[str, Tensor]]:
    """Return the initial values of all adapters: float32, by blob key and canonical name.

    B is zero, so that the model is unchanged. A is uniform in ``+-1/sqrt(in)``, as in peft (Kaiming
    with ``a = sqrt(5)``). The rows of A are drawn one after the other from NumPy's PCG64, so an
    adapter begins with the rows that one of smaller rank has.
    """
    tensors: dict[str, dict[str, Tensor]] = {}
    for index, adapter in adapters:
        shapes = adapter.shapes()
        generator = np.random.default_rng(
            derive_seed(seed, f"adapter/{adapter.linear.name}", block=index)
        )
        bound = 1 / math.sqrt(adapter.linear.shape[1])
        a = generator.uniform(-bound, bound, shapes[adapter.name_a]).astype(np.float32)
        block = tensors.setdefault(block_key(index), {})
        block[adapter.name_a] = torch.from_numpy(a)
        block[adapter.name_b] = torch.zeros(shapes[adapter.name_b])
    return tensors


def initial_values(
    model: OpenedModel, adapters: AdapterPlan, seed: int, cache_folder: Path | None = None
) -> dict[str, dict[str, Tensor]]:
    """Return the initial values of all parameters that a run trains, by blob key.

    They are the adapters, a new classification head, and the tensors that are trained whole with
    their values in the model's files. Errors are those of ``stored_values``. ``cache_folder`` is
    the node's cache of frozen factors; None computes them every time.
    """
    tensors = initial_adapters(adapters, seed)
    if adapters.bases:
        tensors = with_bases(model, adapters, seed, cache_folder)
    others = stored_values(
        model, {key: names for key, names in adapters.whole.items() if key != HEAD_KEY}
    )
    # Only an encoder has a classification head.
    if adapters.head:
        skeleton = model.new_skeleton(adapters.head["head.out.bias"][0])
        head_seed = derive_seed(seed, HEAD_SEED)
        others[HEAD_KEY] = first_head(model, skeleton, head_seed, torch.device("cpu"))
    for key, values in others.items():
        tensors.setdefault(key, {}).update(values)
    return {key: tensors[key] for key in adapters.shapes()}
