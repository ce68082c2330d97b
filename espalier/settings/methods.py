"""The table of methods: a row says where the parts of each lie. Whatever asks for a method's part asks here.

Parts are named by ``module`` or ``module:name`` and imported when they are first asked for: a process that moves bytes does
without torch, and a site without the server's rooms.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from espalier.settings.method import MethodSettings

TUNING_TABLES = ("lora", "task", "training")


@dataclass(frozen=True)
class Row:
    """One method."""

    title: str
    """Name and, in brackets, what it does; for people."""
    settings: str
    """Its own table, a ``MethodSettings``."""
    strategy: str
    """A ``strategies.engine.method.Method``."""
    job: str
    """A module with ``train`` and ``evaluate``, and ``alone`` where clients make something by themselves."""
    delivery: str
    """What clients do with a ``deliver``: a function of site and request; without torch, if it only moves bytes."""
    contracts: str
    """A module with ``contract`` (of train and fetch), ``delivery`` and ``EXAMPLES``."""
    outcome: str
    """A ``server_app.outcomes.outcome.Outcome``: what is written, measured and compared of the result."""
    baseline: str = ""
    """The pooled-data baseline, a function as the outcome calls it; empty: there is none."""
    messages: str = ""
    """A ``server_app.planning.messages.base.Messages``: which messages a run has. Empty: ``espalier plan`` cannot say."""
    work: str = ""
    """A ``server_app.planning.work.base.Work``: what its processes hold and compute. Empty: ``espalier plan`` cannot say."""
    tunes: bool = False
    """Whether clients train, so that ``[lora]``, ``[training]`` and ``[task]`` concern it; else they read windows."""
    federates: bool = True
    """Whether the table ``[federation]`` concerns it."""

    def tables(self, own: str) -> tuple[str, ...]:
        """The tables that the method reads beside those of every run, its own first."""
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
    """What a row names: a module, or something in it."""
    module, colon, name = where.partition(":")
    found = import_module(module)
    return getattr(found, name) if colon else found


def settings_of(method: str) -> "type[MethodSettings]":
    """The class of a method's own table."""
    found: type[MethodSettings] = part(METHODS[method].settings)
    return found


def tables_of(method: str) -> tuple[str, ...]:
    """The tables that a method reads beside those of every run, its own first; none of what is no method."""
    return METHODS[method].tables(method) if method in METHODS else ()


def all_tables() -> set[str]:
    """The tables that some methods read and others do not."""
    return {table for method in METHODS for table in tables_of(method)}
