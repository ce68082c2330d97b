"""Registry of methods: each row names the modules and classes of one method.

Parts are written as ``module`` or ``module:name`` and imported on first use. So a process that only
transfers bytes does not load torch, and a site does not load the server's packages.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from espalier.settings.method import MethodSettings

TUNING_TABLES = ("lora", "task", "training")


@dataclass(frozen=True)
class Row:
    """Parts of one method."""

    title: str
    """Name and, in brackets, a short description for users."""
    settings: str
    """Settings table of the method, a ``MethodSettings`` class."""
    strategy: str
    """Strategy of the method, a ``strategies.engine.method.Method`` class."""
    job: str
    """Module of the client's job.

    It has ``train`` and ``evaluate``, and ``alone`` if clients compute a local baseline or a model
    of their own in a message of its own.
    """
    delivery: str
    """Function of site and request that handles a ``deliver`` message at a client.

    It works without torch if it only transfers bytes.
    """
    contracts: str
    """Module with ``contract`` (for train and fetch), ``delivery`` and ``EXAMPLES``."""
    outcome: str
    """Output of a run, a ``server_app.outcomes.outcome.Outcome`` class.

    It defines which files are written, what is measured and what is compared.
    """
    baseline: str = ""
    """Function that makes the centralized baseline for the outcome; empty without a baseline."""
    messages: str = ""
    """Messages of a run for its estimate, a ``server_app.planning.messages.base.Messages`` class.

    If it is empty, ``espalier plan`` does not support the method.
    """
    work: str = ""
    """Memory and computation for a run's estimate, a ``server_app.planning.work.base.Work`` class.

    If it is empty, ``espalier plan`` does not support the method.
    """
    tunes: bool = False
    """True if clients train; the method then reads ``[lora]``, ``[training]`` and ``[task]``.

    Clients of other methods read calibration samples.
    """
    federates: bool = True
    """True if the method reads the table ``[federation]``."""

    def tables(self, own: str) -> tuple[str, ...]:
        """Return the tables that the method reads besides the general ones, its own first."""
        return (
            own,
            *(("federation",) if self.federates else ()),
            *(TUNING_TABLES if self.tunes else ()),
        )


METHODS: dict[str, Row] = {
    "fedpetuning": Row(
        title="FedPETuning (federated averaging of LoRA adapters)",
        settings="espalier.settings.fedpetuning:FedPETuningSettings",
        strategy="strategies.methods.fedpetuning:FedPETuning",
        job="client_app.tuning",
        delivery="client_app.delivery:take",
        contracts="espalier.wire.tuning",
        messages="server_app.planning.messages.tuning:Tuning",
        work="server_app.planning.work.tuned:Tuned",
        outcome="server_app.outcomes.adapters:AdapterOutcome",
        baseline="strategies.baselines.centralized_tuning:tuned",
        tunes=True,
    ),
    "fedprllm": Row(
        title="FedPrLLM (clients vote with their masks on the weights to prune)",
        settings="espalier.settings.fedprllm:FedPrLLMSettings",
        strategy="strategies.methods.fedprllm:FedPrLLM",
        job="client_app.fedprllm",
        delivery="client_app.delivery:take",
        contracts="espalier.wire.fedprllm",
        messages="server_app.planning.messages.masks:Masks",
        work="server_app.planning.work.by_block:Masking",
        outcome="server_app.outcomes.pruned:PrunedOutcome",
        baseline="strategies.baselines.centralized:masked_by_all",
        federates=False,
    ),
    "fedspallm": Row(
        title=(
            "FedSpaLLM (clients prune sampled layers, the server averages the weights that they"
            " keep)"
        ),
        settings="espalier.settings.fedspallm:FedSpaLLMSettings",
        strategy="strategies.methods.fedspallm:FedSpaLLM",
        job="client_app.fedspallm",
        delivery="client_app.held_layers:take_layers",
        contracts="espalier.wire.fedspallm",
        messages="server_app.planning.messages.kept_layers:KeptLayers",
        work="server_app.planning.work.by_block:KeptWeights",
        outcome="server_app.outcomes.pruned:PrunedOutcome",
        baseline="strategies.baselines.centralized:reconstructed_by_all",
    ),
    "fedsoda": Row(
        title=(
            "FedSODA (LoRA of the last blocks, tuned on a pruned and quantised sub-model that the"
            " server keeps aligned)"
        ),
        settings="espalier.settings.fedsoda:FedSodaSettings",
        strategy="strategies.methods.fedsoda:FedSoda",
        job="client_app.fedsoda",
        delivery="client_app.emulator:take_any",
        contracts="espalier.wire.fedsoda",
        messages="server_app.planning.messages.emulated:Emulated",
        work="server_app.planning.work.tuned:SubTuned",
        outcome="server_app.outcomes.sub_model:SubModelOutcome",
        baseline="strategies.baselines.centralized_tuning:tuned",
        tunes=True,
    ),
    "fedspine": Row(
        title=(
            "FedSpine (devices prune and tune in turn, by ratios and LoRA ranks that a bandit"
            " chooses for each)"
        ),
        settings="espalier.settings.fedspine:FedSpineSettings",
        strategy="strategies.methods.fedspine:FedSpine",
        job="client_app.fedspine",
        delivery="client_app.agreed_cut:take_or_cut",
        contracts="espalier.wire.fedspine",
        messages="server_app.planning.messages.refined:Refined",
        work="server_app.planning.work.tuned:Spined",
        outcome="server_app.outcomes.refined:RefinedOutcome",
        tunes=True,
    ),
    "flap": Row(
        title=(
            "FLAP (attention groups and channels that fluctuate least are cut, on pooled"
            " statistics)"
        ),
        settings="espalier.settings.flap:FlapSettings",
        strategy="strategies.methods.flap:Flap",
        job="client_app.flap",
        delivery="client_app.delivery:take",
        contracts="espalier.wire.flap",
        messages="server_app.planning.messages.cuts:CutsWithBiases",
        work="server_app.planning.work.by_block:Fluctuations",
        outcome="server_app.outcomes.structured:StructuredOutcome",
        baseline="strategies.baselines.centralized_structured:flap_of_all",
        federates=False,
    ),
    "hetlora": Row(
        title="HetLoRA (federated LoRA adapters, with a rank for each client)",
        settings="espalier.settings.hetlora:HetLoRASettings",
        strategy="strategies.methods.hetlora:HetLoRA",
        job="client_app.tuning",
        delivery="client_app.delivery:take",
        contracts="espalier.wire.tuning",
        messages="server_app.planning.messages.tuning:HetLoRA",
        work="server_app.planning.work.tuned:Tuned",
        outcome="server_app.outcomes.adapters:AdapterOutcome",
        baseline="strategies.baselines.centralized_tuning:tuned",
        tunes=True,
    ),
    "llm-pruner": Row(
        title=(
            "LLM-Pruner (units by what the loss would change without them, scores summed over"
            " clients)"
        ),
        settings="espalier.settings.llm_pruner:LlmPrunerSettings",
        strategy="strategies.methods.llm_pruner:LlmPruner",
        job="client_app.llm_pruner",
        delivery="client_app.delivery:take",
        contracts="espalier.wire.llm_pruner",
        messages="server_app.planning.messages.cuts:CutsThatRescale",
        work="server_app.planning.work.whole:WholeGradient",
        outcome="server_app.outcomes.structured:StructuredOutcome",
        baseline="strategies.baselines.centralized_structured:llm_pruner_of_all",
        federates=False,
    ),
    "llm-streamline": Row(
        title=(
            "LLM-Streamline (neighbouring blocks that change least give way to one layer, whose"
            " weights are averaged)"
        ),
        settings="espalier.settings.llm_streamline:LlmStreamlineSettings",
        strategy="strategies.methods.llm_streamline:LlmStreamline",
        job="client_app.llm_streamline",
        delivery="client_app.delivery:take",
        contracts="espalier.wire.llm_streamline",
        messages="server_app.planning.messages.layer:Layer",
        work="server_app.planning.work.whole:OneLayer",
        outcome="server_app.outcomes.structured:StructuredOutcome",
        baseline="strategies.baselines.centralized_structured:llm_streamline_of_all",
    ),
    "sft-p": Row(
        title=(
            "SFT-P (every client prunes for itself, by masks of a shared generator, trained"
            " together with LoRA)"
        ),
        settings="espalier.settings.sft_p:SftPSettings",
        strategy="strategies.methods.sft_p:SftP",
        job="client_app.sft_p",
        delivery="client_app.delivery:take",
        contracts="espalier.wire.sft_p",
        messages="server_app.planning.messages.tuning:SftP",
        work="server_app.planning.work.tuned:Masked",
        outcome="server_app.outcomes.personal_masks:PersonalMasksOutcome",
        tunes=True,
    ),
    "slicegpt": Row(
        title=(
            "SliceGPT (principal components of the residual stream, by pooled second moments, of"
            " which the minor go)"
        ),
        settings="espalier.settings.slicegpt:SliceGptSettings",
        strategy="strategies.methods.slicegpt:SliceGpt",
        job="client_app.slicegpt",
        delivery="client_app.delivery:take",
        contracts="espalier.wire.slicegpt",
        messages="server_app.planning.messages.cuts:Bases",
        work="server_app.planning.work.by_block:Components",
        outcome="server_app.outcomes.sliced:SlicedOutcome",
        baseline="strategies.baselines.centralized_sliced:slicegpt_of_all",
    ),
}


def part(where: str) -> Any:
    """Import what a row names: a module, or an object in it."""
    module, colon, name = where.partition(":")
    found = import_module(module)
    return getattr(found, name) if colon else found


def settings_of(method: str) -> "type[MethodSettings]":
    """Return the class of a method's own settings table."""
    found: type[MethodSettings] = part(METHODS[method].settings)
    return found


def tables_of(method: str) -> tuple[str, ...]:
    """Return the tables that a method reads besides the general ones; none if it is unknown."""
    return METHODS[method].tables(method) if method in METHODS else ()


def all_tables() -> set[str]:
    """Return the tables that only some of the methods read."""
    return {table for method in METHODS for table in tables_of(method)}
