"""Looks of the arms of studies, whose names are those of tables."""

from espalier.results.style import BLUE, GREY, METHODS, MODELS, ORANGE, OTHER, PURPLE, Look

CHANCE = Look(GREY, "x", ":")
"""Look of guessing."""
NAMES = {
    "FedPrLLM": METHODS["fedprllm"],
    "FedSpaLLM": METHODS["fedspallm"],
    "FLAP": METHODS["flap"],
    "LLM-Pruner": METHODS["llm-pruner"],
    "LLM-Streamline": METHODS["llm-streamline"],
    "SliceGPT": METHODS["slicegpt"],
    "FedPETuning": METHODS["fedpetuning"],
    "HetLoRA": METHODS["hetlora"],
    "FFA-LoRA": METHODS["fedpetuning"].variant(1),
    "RoLoRA": METHODS["fedpetuning"].variant(2),
    "FedEx-LoRA": METHODS["fedpetuning"].variant(3),
    "raFLoRA": METHODS["hetlora"].variant(1),
    "raFLoRA, limited": METHODS["hetlora"].variant(2),
    "FLoRA": METHODS["flora"],
    "Fed-SB": METHODS["fed-sb"],
    "Fed-SB, rank 64": METHODS["fed-sb"].variant(1),
    "Fed-SB, rank 64, rate 0.003": METHODS["fed-sb"].variant(2),
    "FedSODA": METHODS["fedsoda"],
    "SFT-P": METHODS["sft-p"],
    "FedSpine": METHODS["fedspine"],
    # Methods of other papers, which run as settings of ours.
    "FedOT": Look(PURPLE, "p"),
    "FedBiOT": Look(ORANGE, "d"),
    "FedAPT": Look(BLUE, "d"),
    "FedAvg": Look(GREY, "p"),
    # FedPETuning and HetLoRA with the two ways of averaging.
    "ranks 2 to 32": METHODS["hetlora"],
    "ranks 2 to 32, svd": METHODS["hetlora"].variant(1),
    "rank 8": METHODS["fedpetuning"],
    "rank 8, svd": METHODS["fedpetuning"].variant(1),
    "pooled": METHODS["pooled-pruning"],
    # Models that are compared with the result of a method.
    "dense": MODELS["dense"],
    "standalone": MODELS["local_baseline"],
    "local-baseline": MODELS["local_baseline"],
    "local Wanda": MODELS["local_baseline"],
    "local baseline": MODELS["local_baseline"],
    "centralized": MODELS["centralized"],
    "federated": MODELS["federated"],
    "majority": CHANCE,
}
"""Look by the beginning of a name."""


def look_of_arm(name: str, default: Look = OTHER) -> Look:
    """Return the look of an arm, by the longest known name with which its name begins."""
    known = [start for start in NAMES if name.startswith(start)]
    return NAMES[max(known, key=len)] if known else default
