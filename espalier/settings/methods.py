"""Registry of methods: each row names the modules and classes of one method.

Parts are written as ``module`` or ``module:name`` and imported on first use. So a process that only
transfers bytes does not load torch, and a site does not load the server's packages.
"""

from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from espalier.settings.shared_keys import shared_keys

if TYPE_CHECKING:
    from espalier.settings.method import MethodSettings

TUNING_TABLES = ("lora", "task", "training")


@dataclass(frozen=True)
class Row:
    """Parts of one method."""

    title: str
    """Name and, in brackets, a short description for users."""
    settings: str
    """Settings table of the method, a ``MethodSettings`` class.

    Its module also has the contracts, unless ``contracts`` names another one.
    """
    strategy: str
    """Strategy of the method, a ``strategies.base.method.Method`` class."""
    job: str
    """Module of the client's job.

    It has ``train`` and ``evaluate``, and ``local_baseline`` if clients compute one or a model
    of their own in a message of its own.
    """
    contracts: str = ""
    """Module of the contracts; empty if it is that of ``settings``.

    It has ``contract`` (for train and fetch), ``push_contract`` and, optionally, ``EXAMPLES``.
    """
    push: str = "client_app.protocol.push:take"
    """Function of site and request that handles a ``push`` message at a client.

    It works without torch if it only transfers bytes.
    """
    outcome: str = "server_app.artifacts.pruned_model:EditedOutcome"
    """Output of a run, a ``server_app.artifacts.outcome.Outcome`` class.

    It defines which files are written, what is measured and what is compared.
    """
    baseline: str = ""
    """Function that makes the centralized baseline for the outcome; empty without a baseline."""
    dry_run: str = "server_app.estimate.messages.pruning:DryEditing"
    """Assumptions with which the strategy runs without clients, a ``DryRun`` class.

    The default suits strategies that are ``Editing``.
    """
    work: str = "server_app.estimate.work.pruning:BlockWalk"
    """Memory and computation for a run's estimate, a ``server_app.estimate.work.work.Work`` class."""
    tunes: bool = False
    """True if clients train; the method then reads ``[lora]``, ``[training]`` and ``[task]``.

    Clients of other methods read calibration samples.
    """
    summands: str = ""
    """Function of round, plan and settings that returns the specs of a reply's summands.

    Its result is a ``SumSpecs`` of ``espalier.messages.sums.summands``. Empty if clients' tensors cannot
    be summed secretly (``federation.secure-sum``).
    """
    to_summands: str = ""
    """Function that turns a client's plain reply into the summands of one blob.

    It is a ``client_app.summands.plain_blob.ToSummands``.
    """
    summands_reason: str = ""
    """Reason why there are no ``summands``, as the end of a sentence about the method."""

    @property
    def contracts_module(self) -> str:
        """Module of the contracts."""
        return self.contracts or self.settings.partition(":")[0]

    def tables(self, own: str) -> tuple[str, ...]:
        """Return the tables that the method reads besides the general ones, its own first."""
        shared = dict.fromkeys(shared_keys(part(self.settings)).values())
        tuning = TUNING_TABLES if self.tunes else ()
        return (own, "federation", *tuning, *(name for name in shared if name not in tuning))


FEDPETUNING = Row(
    title="FedPETuning (federated averaging of LoRA adapters)",
    settings="espalier.methods.tuning.fedpetuning:FedPETuningSettings",
    contracts="espalier.methods.tuning.adapters.contract",
    strategy="strategies.tuning.fedpetuning:FedPETuning",
    job="client_app.methods.tuning.fedpetuning",
    summands="espalier.methods.tuning.adapters.summands:summands",
    to_summands="client_app.summands.adapters:of_adapters",
    dry_run="server_app.estimate.messages.tuning:DryTuning",
    work="server_app.estimate.work.tuning:Tuned",
    outcome="server_app.artifacts.adapters:AdapterOutcome",
    baseline="strategies.baselines:tuned",
    tunes=True,
)
"""Row of the method that averages adapters; rows of its variants name only what differs."""

METHODS: dict[str, Row] = {
    "fedpetuning": FEDPETUNING,
    "fedprllm": Row(
        title="FedPrLLM (clients vote with their masks on the weights to prune)",
        settings="espalier.methods.pruning.fedprllm:FedPrLLMSettings",
        strategy="strategies.pruning.fedprllm:FedPrLLM",
        job="client_app.methods.pruning.fedprllm",
        summands="espalier.methods.pruning.fedprllm:summands",
        to_summands="client_app.summands.votes:of_masks",
        dry_run="server_app.estimate.messages.pruning:DryFedPrLLM",
        work="server_app.estimate.work.pruning:Masking",
        outcome="server_app.artifacts.pruned_model:PrunedOutcome",
        baseline="strategies.baselines:masked_by_all",
    ),
    "fedspallm": Row(
        title=(
            "FedSpaLLM (clients prune sampled layers, the server averages the weights that they"
            " keep)"
        ),
        settings="espalier.methods.pruning.fedspallm:FedSpaLLMSettings",
        strategy="strategies.pruning.fedspallm.strategy:FedSpaLLM",
        job="client_app.methods.pruning.fedspallm",
        summands="espalier.methods.pruning.fedspallm:summands",
        to_summands="client_app.summands.votes:of_kept",
        push="client_app.methods.pruning.fedspallm_layers:take_layers",
        dry_run="server_app.estimate.messages.pruning:DryFedSpaLLM",
        work="server_app.estimate.work.pruning:KeptWeights",
        outcome="server_app.artifacts.pruned_model:PrunedOutcome",
        baseline="strategies.baselines:reconstructed_by_all",
    ),
    "fed-sb": replace(
        FEDPETUNING,
        title="Fed-SB (only a small square matrix between the frozen factors of LoRA is trained)",
        settings="espalier.methods.tuning.fed_sb:FedSbSettings",
        strategy="strategies.tuning.fed_sb:FedSb",
    ),
    "fedsoda": Row(
        title=(
            "FedSODA (LoRA of the last blocks, tuned on a pruned and quantised sub-model that the"
            " server keeps aligned)"
        ),
        settings="espalier.methods.tuning.fedsoda:FedSodaSettings",
        strategy="strategies.tuning.fedsoda.strategy:FedSoda",
        job="client_app.methods.tuning.fedsoda",
        summands="espalier.methods.tuning.adapters.summands:summands",
        to_summands="client_app.summands.adapters:of_adapters",
        push="client_app.methods.tuning.fedsoda:take_any",
        dry_run="server_app.estimate.messages.tuning:DryFedSoda",
        work="server_app.estimate.work.tuning:SubTuned",
        outcome="server_app.artifacts.adapters:SubModelOutcome",
        baseline="strategies.baselines:tuned",
        tunes=True,
    ),
    "fedspine": Row(
        title=(
            "FedSpine (devices prune and tune in turn, by ratios and LoRA ranks that a bandit"
            " chooses for each)"
        ),
        settings="espalier.methods.tuning.fedspine:FedSpineSettings",
        strategy="strategies.tuning.fedspine.strategy:FedSpine",
        job="client_app.methods.tuning.fedspine",
        summands_reason=(
            "chooses a ratio and a rank for each client by its losses, and averages each row"
            " over the clients that kept it, weighted by the importance of each"
        ),
        push="client_app.methods.tuning.fedspine_cut:take_or_cut",
        dry_run="server_app.estimate.messages.tuning:DryFedSpine",
        work="server_app.estimate.work.tuning:Spined",
        outcome="server_app.artifacts.fedspine:RefinedOutcome",
        tunes=True,
    ),
    "flap": Row(
        title=(
            "FLAP (attention groups and channels that fluctuate least are cut, on pooled"
            " statistics)"
        ),
        settings="espalier.methods.pruning.flap:FlapSettings",
        strategy="strategies.pruning.flap:Flap",
        job="client_app.methods.pruning.flap",
        summands="espalier.methods.pruning.flap:summands",
        to_summands="client_app.summands.statistics:of_input_sums",
        dry_run="server_app.estimate.messages.pruning:DryCutting",
        work="server_app.estimate.work.pruning:Cut",
        outcome="server_app.artifacts.structured_model:StructuredOutcome",
        baseline="strategies.baselines:flap_of_all",
    ),
    "flora": replace(
        FEDPETUNING,
        title="FLoRA (LoRA adapters of any rank are stacked, and folded into the base)",
        settings="espalier.methods.tuning.flora:FloraSettings",
        strategy="strategies.tuning.flora:Flora",
        summands="",
        to_summands="",
        summands_reason="stacks the clients' adapters, which do not follow from their sum",
    ),
    "hetlora": replace(
        FEDPETUNING,
        title="HetLoRA (federated LoRA adapters, with a rank for each client)",
        settings="espalier.methods.tuning.hetlora:HetLoRASettings",
        strategy="strategies.tuning.hetlora:HetLoRA",
        summands="",
        to_summands="",
        summands_reason=(
            "weights clients by the norm of each one's update, and they have ranks of their"
            " own and give some up"
        ),
        dry_run="server_app.estimate.messages.tuning:DryHetLoRA",
    ),
    "llm-pruner": Row(
        title=(
            "LLM-Pruner (groups by what the loss would change without them, scores summed over"
            " clients)"
        ),
        settings="espalier.methods.pruning.llm_pruner:LlmPrunerSettings",
        strategy="strategies.pruning.llm_pruner:LlmPruner",
        job="client_app.methods.pruning.llm_pruner",
        summands="espalier.methods.pruning.llm_pruner:summands",
        to_summands="client_app.summands.statistics:of_scores",
        dry_run="server_app.estimate.messages.pruning:DryLlmPruner",
        work="server_app.estimate.work.pruning:WholeGradient",
        outcome="server_app.artifacts.structured_model:StructuredOutcome",
        baseline="strategies.baselines:llm_pruner_of_all",
    ),
    "llm-streamline": Row(
        title=(
            "LLM-Streamline (neighbouring blocks that change least give way to one layer, whose"
            " weights are averaged)"
        ),
        settings="espalier.methods.pruning.llm_streamline:LlmStreamlineSettings",
        strategy="strategies.pruning.llm_streamline:LlmStreamline",
        job="client_app.methods.pruning.llm_streamline",
        summands_reason=("has no fixed point with a bound for similarities and layers"),
        dry_run="server_app.estimate.messages.pruning:DryLlmStreamline",
        work="server_app.estimate.work.pruning:OneLayer",
        outcome="server_app.artifacts.structured_model:StructuredOutcome",
        baseline="strategies.baselines:llm_streamline_of_all",
    ),
    "pooled-pruning": Row(
        title=(
            "Pooled pruning (Wanda or RIA on the sum of the clients' squared inputs, as if all text"
            " were in one place)"
        ),
        settings="espalier.methods.pruning.pooled_pruning:PooledPruningSettings",
        strategy="strategies.pruning.pooled_pruning:PooledPruning",
        job="client_app.methods.pruning.pooled_pruning",
        dry_run="server_app.estimate.messages.pruning:DryPooledPruning",
        work="server_app.estimate.work.pruning:Pooled",
        outcome="server_app.artifacts.pruned_model:PooledOutcome",
        baseline="strategies.baselines:pooled_by_all",
        summands="espalier.methods.pruning.pooled_pruning:summands",
        to_summands="client_app.summands.statistics:of_input_sums",
    ),
    "sft-p": Row(
        title=(
            "SFT-P (every client prunes for itself, by masks of a shared generator, trained"
            " together with LoRA)"
        ),
        settings="espalier.methods.tuning.sft_p:SftPSettings",
        strategy="strategies.tuning.sft_p:SftP",
        job="client_app.methods.tuning.sft_p",
        summands="espalier.methods.tuning.sft_p:summands",
        to_summands="client_app.summands.adapters:of_adapters",
        dry_run="server_app.estimate.messages.tuning:DryTuning",
        work="server_app.estimate.work.tuning:Masked",
        outcome="server_app.artifacts.personal_models:PersonalMasksOutcome",
        tunes=True,
    ),
    "slicegpt": Row(
        title=(
            "SliceGPT (principal components of the residual stream, by pooled second moments, of"
            " which the minor go)"
        ),
        settings="espalier.methods.pruning.slicegpt:SliceGptSettings",
        strategy="strategies.pruning.slicegpt:SliceGpt",
        job="client_app.methods.pruning.slicegpt",
        summands="espalier.methods.pruning.slicegpt:summands",
        to_summands="client_app.summands.statistics:of_moments",
        dry_run="server_app.estimate.messages.pruning:DrySliceGpt",
        work="server_app.estimate.work.pruning:Components",
        outcome="server_app.artifacts.structured_model:SlicedOutcome",
        baseline="strategies.baselines:slicegpt_of_all",
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
