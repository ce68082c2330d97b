"""Whole base model with its trained parameters: adapters, and tensors that are trained whole."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from espalier.hf.machine.computing import Computing
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.whole.adapters import keep_zeros, put_in, set_values, values
from espalier.hf.whole.full_tensors import trained_whole
from espalier.hf.whole.model import load_whole
from espalier.models.adapters import AdapterPlan, Tensors
from espalier.seeds import derive_seed
from espalier.settings.run import RunSettings
from espalier.training.initial_values import HEAD_SEED

Choice = Callable[[str, str], bool]
"""Function of the blob key and canonical name of a parameter."""


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
        the model's files. Errors are those of ``load_whole`` and ``trained_whole``.
        """
        head = adapters.head
        # The head gets its number of classes from its bias.
        hf_model = load_whole(
            model,
            computing,
            settings.training.base,
            num_labels=head["head.out.bias"][0] if head else None,
            seed=derive_seed(settings.seed, HEAD_SEED),
            cache_folder=cache_folder,
        )
        # Other whole tensors first: adapters must not be counted among them.
        other_parameters = trained_whole(model, hf_model, adapters.whole)
        parameters = {}
        # Adapters are modules, so the names of the model's own parameters change.
        if adapters.blocks:
            blocks = len(model.plan.blocks)
            parameters = put_in(hf_model, model.family, adapters, blocks, settings.lora.dropout)
        # Pruned weights stay zero under the adapters.
        if adapters.keep_zeros:
            keep_zeros(model, hf_model, adapters)
        for key, tensors in other_parameters.items():
            parameters.setdefault(key, {}).update(tensors)
        # The modules of peft begin in training mode, with dropout.
        hf_model.eval()
        return AdaptedModel(hf_model, parameters)

    def set(self, tensors: Tensors) -> None:
        """Set trained parameters; blobs that ``tensors`` lacks are not changed."""
        set_values(
            {key: block for key, block in self.parameters.items() if key in tensors}, tensors
        )

    def values(self) -> dict[str, dict[str, Tensor]]:
        """Return copies of the trained parameters on the CPU."""
        return values(self.parameters)

    def chosen(self, among: Choice) -> dict[str, dict[str, nn.Parameter]]:
        """Return the parameters for which a function of blob key and name is true."""
        parameters = {
            key: {name: value for name, value in block.items() if among(key, name)}
            for key, block in self.parameters.items()
        }
        return {key: block for key, block in parameters.items() if block}

    @contextmanager
    def frozen(self, among: Choice) -> Iterator[None]:
        """Exclude the parameters of a choice from training within the block.

        Otherwise the backward pass would continue below the lowest trained adapter.
        """
        parameters = [value for block in self.chosen(among).values() for value in block.values()]
        for value in parameters:
            # Gradients of frozen parameters are not even computed.
            value.requires_grad_(False)
        try:
            yield
        finally:
            for value in parameters:
                value.requires_grad_(True)


def flat_name(key: str, name: str) -> str:
    """Return the unique name of a trained tensor, made of blob key and canonical name."""
    return f"{key}/{name}"


def flattened(parameters: Mapping[str, Mapping[str, nn.Parameter]]) -> dict[str, nn.Parameter]:
    """Return the parameters by ``flat_name``."""
    return {
        flat_name(key, name): value
        for key, block in parameters.items()
        for name, value in block.items()
    }


Loader = Callable[[OpenedModel, Computing, RunSettings, AdapterPlan, Path | None], AdaptedModel]
"""``AdaptedModel.load``, or a function that returns a model that is already in memory."""
