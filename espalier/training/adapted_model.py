"""Whole base model with its trained parameters.

The trained parameters are adapters, and tensors that are trained whole, such as an encoder's
classification head.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from espalier.hf.machine.computing import Computing
from espalier.hf.opening.opened import OpenedModel
from espalier.hf.whole.adapters import keep_zeros, put_in, set_values, values
from espalier.hf.whole.full_tensors import trained_whole
from espalier.hf.whole.model import load_whole
from espalier.models.adapters import AdapterPlan, Tensors
from espalier.seeds import derive_seed
from espalier.settings.run import RunSettings
from espalier.training.initial_values import HEAD_SEED


@dataclass
class AdaptedModel:
    """Model in memory whose trained parameters can be read and set.

    A method that adds its own tensors to ``whole``, for instance in a hook, lists them in
    ``parameters``.
    """

    whole: Any
    """Model of Hugging Face, in evaluation mode."""
    parameters: dict[str, dict[str, nn.Parameter]]
    """Trained parameters: float32, by blob key and canonical name."""

    @staticmethod
    def load(
        model: OpenedModel,
        computing: Computing,
        settings: RunSettings,
        adapters: AdapterPlan,
        cache_folder: Path | None = None,
    ) -> "AdaptedModel":
        """Load the base in the precision of ``training.base`` and insert the adapters.

        A head is made from the run's seed. Other tensors that are trained whole have the values of
        the model's files.

        Raises
        ------
        InputError
            See ``load_whole`` and ``trained_whole``.
        """
        chosen = settings.training
        head = adapters.head
        whole = load_whole(
            model,
            computing,
            chosen.base,
            num_labels=head["head.out.bias"][0] if head else None,
            seed=derive_seed(settings.seed, HEAD_SEED),
            cache_folder=cache_folder,
        )
        others = trained_whole(model, whole, adapters.whole)
        blocks = len(model.plan.blocks)
        dropout = settings.lora.dropout
        parameters = (
            put_in(whole, model.family, adapters, blocks, dropout) if adapters.blocks else {}
        )
        if adapters.keep_zeros:
            keep_zeros(model, whole, adapters)
        for key, tensors in others.items():
            parameters.setdefault(key, {}).update(tensors)
        return AdaptedModel(whole, parameters)

    def set(self, tensors: Tensors) -> None:
        """Set trained parameters; blobs that ``tensors`` lacks are not changed."""
        set_values(
            {key: block for key, block in self.parameters.items() if key in tensors}, tensors
        )

    def values(self) -> dict[str, dict[str, Tensor]]:
        """Return copies of the trained parameters on the CPU."""
        return values(self.parameters)


Loader = Callable[[OpenedModel, Computing, RunSettings, AdapterPlan, Path | None], AdaptedModel]
"""``AdaptedModel.load``, or a function that returns a model that is already in memory."""
