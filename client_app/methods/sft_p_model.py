"""Smaller dense model of an SFT-P client, within the client's own budget."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from client_app.site import Site
from espalier.data.client_text import validation_samples
from espalier.errors import EspalierError, InputError
from espalier.evaluation.perplexity import mean_losses, perplexity
from espalier.hf.opening.opened import OpenedModel
from espalier.hf.stream.block_stream import BlockStream
from espalier.hf.stream.edits import Edits
from espalier.hf.structured.residual_gates import Gate, ResidualGates
from espalier.hf.structured.trained_cut import cut_adapter_plan, cut_trained
from espalier.hf.whole.adapters import factors_of, merged
from espalier.messages.message import Header
from espalier.methods.sft_p import BIAS, SftPSettings, lora_plan, shape_of
from espalier.models.adapters import AdapterPlan, Tensors
from espalier.models.plan import block_key
from espalier.training.sft_p.mask_generator import gate_logits


@dataclass(frozen=True)
class SmallerModel:
    """Smaller dense model, given by a generator and an embedding, with LoRA cut to its shape."""

    chosen: Mapping[Gate, Tensor]
    """Mask of what each gate keeps (residual dimensions, heads or channels), (size,), bool."""
    model: OpenedModel
    adapters: AdapterPlan
    tensors: Tensors
    """Values of LoRA."""

    @staticmethod
    def of(site: Site, header: Header, tensors: Tensors, embedding: Tensor) -> "SmallerModel":
        """Build the smaller model."""
        job = site.settings.of(SftPSettings)
        plan = site.model.plan
        gates = ResidualGates(plan)
        logits = gate_logits(plan, shape_of(site.settings), tensors, embedding)
        biased = {gate: own + BIAS for gate, own in logits.items()}
        chosen = gates.chosen(biased, own_target(site, header) if job.masks == "budget" else None)
        structure = gates.structure(chosen, norm_of_read=job.norm == "read")
        adapters = cut_adapter_plan(lora_plan(plan, site.settings), plan, structure)
        smaller = OpenedModel(site.model.directory, structure)
        return SmallerModel(
            chosen, smaller, adapters, cut_trained(_lora_of(tensors), plan, structure)
        )

    @property
    def edits(self) -> Edits:
        """Edits that merge LoRA into the smaller model."""
        return merged(
            lambda index: factors_of(self.adapters, index, self.tensors.get(block_key(index), {}))
        )

    def validated(self, site: Site, header: Header) -> float | None:
        """Return its perplexity on the client's own held-out text, which is not sent.

        The result is None without ``validation_samples``, or if the text is too short.
        """
        number = site.settings.of(SftPSettings).validation_samples
        if not number:
            return None
        try:
            samples = validation_samples(
                site.settings, site.node, site.model.encode, header.client, number
            )
        # The perplexity is only informative, so a missing one must not cost a round.
        except EspalierError as error:
            logging.getLogger("espalier").warning("no validation: %s", error)
            return None
        return perplexity(
            mean_losses(BlockStream(self.model, site.computing), {"": samples}, self.edits)[""]
        )

    def loaded(self, site: Site) -> Any:
        """Return the whole model in memory, with LoRA.

        If clients train in NF4, it is loaded in the computing dtype, because the shapes after the
        cut need not be multiples of the NF4 block size.
        """
        settings = site.settings
        base = site.settings.training.base
        if base == "nf4":
            dtype = "bfloat16" if site.computing.dtype == torch.bfloat16 else "float32"
            training = settings.training.model_copy(update={"base": dtype})
            settings = settings.model_copy(update={"training": training})
        adapted = site.load(self.model, site.computing, settings, self.adapters, None)
        adapted.set(self.tensors)
        return adapted.whole


def _lora_of(tensors: Tensors) -> dict[str, dict[str, Tensor]]:
    found = {
        key: {name: value for name, value in own.items() if ".lora_" in name}
        for key, own in tensors.items()
    }
    return {key: own for key, own in found.items() if own}


def own_target(site: Site, header: Header | None) -> int:
    """Return the maximum number of block weights in this client's model.

    Without a header, the target of an individual simulated client is not used.

    Raises
    ------
    InputError
        The pruning ratio is too large. A ratio that the site's owner chose is not sent to the
        server.
    """
    job = site.settings.of(SftPSettings)
    own = site.node.pruned_share
    run_s = (
        job.pruning_ratio_of_client(header.client)
        if header is not None and site.node.simulated
        else job.pruning_ratio
    )
    try:
        return ResidualGates(site.model.plan).target(own or run_s, job.pruning_ratio_of)
    except EspalierError as error:
        if own:
            raise InputError(f"pruned-share in --node-config: {error}", OUTWARD) from None
        raise InputError(f"{site.settings.method}.{error}") from None


OUTWARD = (
    "pruned-share in --node-config: this site's model cannot lose what its owner chose; the node's"
    " log says more"
)
