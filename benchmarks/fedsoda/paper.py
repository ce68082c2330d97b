"""The figures that FedSODA's paper prints, as it prints them, and the settings of its section 6.1. Data only."""

from dataclasses import dataclass

TITLES = {"llama3-8b": "LLaMA3-8B", "qwen2-7b": "Qwen2-7B", "mistral-7b": "Mistral-7B"}
"""Known shape (``espalier.training.shapes``) -> the paper's name."""

RANK = 8
ADAPTER_LAYERS = 3
"""L_A, the last layers, which clients train."""
PRUNED = 3
GROUPS = 4
"""n layers are pruned in each of p groups, 12 together; the two baselines prune as many."""
INTERVAL = 5
"""Rounds between two alignments, ``r`` in the paper's tables."""
TARGETS = ("attn.q", "attn.k", "attn.v", "mlp.up", "mlp.down")
"""Adapted matrices. The paper does not name them; these fit its counts (see ``tables.placements``)."""


@dataclass(frozen=True)
class Method:
    """One line of Table 2. Parameters are in millions."""

    gsm8k: str
    sst2: str
    boolq: str
    trained: str
    communicated: str
    """In a round."""
    size: str
    """GB of the model at a client."""


TABLE_2 = {
    "llama3-8b": {
        "FedPETuning": Method("64.3", "89.4", "68.4", "15.2", "30.4", "15.0"),
        "FedOT": Method("60.7", "86.3", "66.8", "1.3", "2.6", "10.1"),
        "FedBiOT": Method("63.2", "88.2", "68.1", "1.3", "10.2", "10.1"),
        "FedSODA": Method("63.5", "87.8", "68.6", "1.3", "3", "3.8"),
    },
    "qwen2-7b": {
        "FedPETuning": Method("69.5", "94.6", "75.7", "15.5", "30.9", "14.2"),
        "FedOT": Method("67.1", "89.4", "72.6", "1.4", "2.8", "9.0"),
        "FedBiOT": Method("68.5", "94.8", "75.1", "1.4", "11.1", "9.0"),
        "FedSODA": Method("68.8", "94.3", "74.8", "1.4", "3.3", "3.4"),
    },
    "mistral-7b": {
        "FedPETuning": Method("58.3", "77.5", "66.9", "15.2", "30.4", "13.5"),
        "FedOT": Method("54.3", "74.5", "64.6", "1.3", "2.6", "8.6"),
        "FedBiOT": Method("57.7", "75.7", "66.4", "1.3", "10.2", "8.6"),
        "FedSODA": Method("57.2", "76.6", "67.2", "1.3", "3", "3.2"),
    },
}


@dataclass(frozen=True)
class Setting:
    """One line of Tables 4, 7 and 8: accuracy on BoolQ in percent, and MB in a round."""

    accuracy: str
    communication: str


@dataclass(frozen=True)
class ParameterStudy:
    """One of Tables 4, 7 and 8."""

    model: str
    combinations: dict[tuple[int, int], Setting]
    """By (n, p), aligned every ``INTERVAL`` rounds."""
    intervals: dict[int, Setting]
    """By the interval, with ``PRUNED`` and ``GROUPS``."""


PARAMETER_STUDIES = {
    "Table 4": ParameterStudy(
        "llama3-8b",
        {
            (2, 6): Setting("68.4", "1.51"),
            (3, 4): Setting("68.6", "1.43"),
            (4, 3): Setting("67.9", "1.39"),
        },
        {2: Setting("68.1", "1.69"), 5: Setting("68.6", "1.43"), 10: Setting("67.2", "1.35")},
    ),
    "Table 7": ParameterStudy(
        "qwen2-7b",
        {
            (2, 6): Setting("74.6", "1.66"),
            (3, 4): Setting("74.8", "1.57"),
            (4, 3): Setting("73.4", "1.52"),
        },
        {2: Setting("68.1", "1.84"), 5: Setting("68.6", "1.57"), 10: Setting("67.4", "1.46")},
    ),
    "Table 8": ParameterStudy(
        "mistral-7b",
        {
            (2, 6): Setting("67", "1.51"),
            (3, 4): Setting("67.2", "1.43"),
            (4, 3): Setting("66.7", "1.39"),
        },
        {2: Setting("66.4", "1.69"), 5: Setting("67.2", "1.43"), 10: Setting("65.4", "1.35")},
    ),
}


@dataclass(frozen=True)
class Ablation:
    """One of Tables 3, 5 and 6."""

    task: str
    """A field of ``Method``."""
    accuracies: tuple[tuple[str, ...], ...]
    """Without alignment, with pre-alignment, with realignment, with both; a column for each model of ``TITLES``."""


ABLATIONS = {
    "Table 3": Ablation(
        "boolq",
        (
            ("62.4", "63.9", "61.3"),
            ("66.7", "70.4", "65.9"),
            ("64.1", "66.7", "63.5"),
            ("68.6", "72.8", "66.2"),
        ),
    ),
    "Table 5": Ablation(
        "gsm8k",
        (
            ("60.3", "66.4", "53.9"),
            ("62.7", "67.8", "56.5"),
            ("62.1", "67", "56.1"),
            ("63.5", "68.8", "57.2"),
        ),
    ),
    "Table 6": Ablation(
        "sst2",
        (
            ("62.4", "63.9", "61.3"),
            ("66.7", "70.4", "65.9"),
            ("64.1", "66.7", "63.5"),
            ("68.6", "72.8", "66.2"),
        ),
    ),
}

COMMUNICATION_SAVED = "70.6"
STORAGE_SAVED = "75.6"
ACCURACY_GAINED = "3.1"
"""Percent, on average: the abstract. The first is measured against FedBiOT (section 6.2)."""
COMPUTATION_SHARE = "8.55"
COMMUNICATION_SHARE = "9.87"
SIZE_SHARES = ("24", "26")
SIZE = "4"
"""Percent of FedPETuning's computation, communication, and least and most of its size; GB: section 6.2."""
COMPRESSION = "8"
CONSTANT_BITS = "0.5"
NESTED_CONSTANT_BITS = "0.127"
REDUCTIONS = ("6", "7")
"""Appendix C: most of NF4 against float32, bits of the constants, and the reduction that usually remains."""

DATASETS = {
    "GSM8K": ("8792", 7473, 1319),
    "SST-2": ("67349", 67349, 872),
    "BoolQ": ("12697", 9427, 3270),
}
"""Appendix D: all examples, and those of the two parts."""
WIKITEXT_2_TOKENS = "100"
"""Millions, or more: appendix D.1."""
WIKITEXT_2_PARTS = (2_088_628, 217_646, 245_569)
"""Tokens of training, validation and test part, as the dataset itself was published (Merity et al. 2016, table 1)."""
