"""Figures of FedSODA's paper, as printed, and the settings of its section 6.1; data only."""

from dataclasses import dataclass

TITLES = {"llama3-8b": "LLaMA3-8B", "qwen2-7b": "Qwen2-7B", "mistral-7b": "Mistral-7B"}
"""Name in the paper by known shape (``benchmarks.models.published_models``)."""

RANK = 8
ADAPTER_LAYERS = 3
"""Number of adapter layers L_A: the last layers, which clients train."""
PRUNED = 3
GROUPS = 4
"""Number of groups p, in each of which n = ``PRUNED`` layers are pruned.

These are 12 layers in total; the two baselines prune the same number.
"""
INTERVAL = 5
"""Number of rounds between two alignments, ``r`` in the paper's tables."""
TARGETS = ("attn.q", "attn.k", "attn.v", "mlp.up", "mlp.down")
"""Adapted matrices; the paper does not name them, but these fit its counts.

See ``recount.placements``.
"""


@dataclass(frozen=True)
class Method:
    """One line of Table 2; parameters are in millions."""

    gsm8k: str
    sst2: str
    boolq: str
    trained: str
    communicated: str
    """Parameters sent in a round."""
    size: str
    """Size of the model at a client in GB."""


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
    """Lines by (n, p), with an alignment every ``INTERVAL`` rounds."""
    intervals: dict[int, Setting]
    """Lines by interval, with ``PRUNED`` and ``GROUPS``."""


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
    """Name of the task: a field of ``Method``."""
    accuracies: tuple[tuple[str, ...], ...]
    """Accuracies without alignment, with pre-alignment, with realignment, and with both.

    There is a column for each model of ``TITLES``.
    """


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
"""Mean relative gain of accuracy in percent (abstract).

The constants above are the saved communication, compared with FedBiOT (section 6.2), and the saved
storage, in percent.
"""
COMPUTATION_SHARE = "8.55"
COMMUNICATION_SHARE = "9.87"
SIZE_SHARES = ("24", "26")
SIZE = "4"
"""Size of the model in GB (section 6.2).

The constants above are FedSODA's computation, communication, and minimum and maximum size, in
percent of FedPETuning's.
"""
COMPRESSION = "8"
CONSTANT_BITS = "0.5"
NESTED_CONSTANT_BITS = "0.127"
REDUCTIONS = ("6", "7")
"""Reduction of storage that usually remains (appendix C).

The constants above are the maximum reduction of NF4 against float32, and the bits of the constants.
"""

DATASETS = {
    "GSM8K": ("8792", 7473, 1319),
    "SST-2": ("67349", 67349, 872),
    "BoolQ": ("12697", 9427, 3270),
}
"""Number of examples in total, in the training part and in the test part (appendix D)."""
WIKITEXT_2_TOKENS = "100"
"""Number of tokens in millions, as a lower bound (appendix D.1)."""
WIKITEXT_2_PARTS = (2_088_628, 217_646, 245_569)
"""Tokens of training, validation and test part as published (Merity et al. 2016, table 1)."""
