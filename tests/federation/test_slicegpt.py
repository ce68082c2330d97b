"""SliceGPT in a small federation: the promises of every method, and its bases against those of pooled texts."""

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from bench import Bench, model_files, summary
from promises import Promises, Uninterrupted
from test_flap import all_windows
from transformers import AutoModelForCausalLM

from espalier.modeling.opened import OpenedModel
from espalier.settings.mistakes import Mistake
from espalier.storage.blobs import sha256
from espalier.wire.messages import Letter, read
from espalier.wire.payload import pack_tensors, unpack_tensors
from strategies.engine.rounds import RunFailed

WIDTH = 12


class TestSliceGpt(Promises):
    """One round; a residual stream of width 16 keeps 12."""

    method = "slicegpt"
    settings: ClassVar[dict[str, Any]] = {"slicegpt.slicing": 0.25, "slicegpt.multiple": 4}
    last_round = 1
    cuts_windows = "calibration_windows"

    def other_orders(self, order: Letter) -> list[Letter]:
        """There is nothing in an order that could be another."""
        return []
