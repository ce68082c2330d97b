"""Error line for a key that does not exist, with a suggestion where one can be made."""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence

FOREIGN = {
    "lr": "training.learning-rate",
    "epochs": "training.steps",
    "num-train-epochs": "training.steps",
    "max-steps": "training.steps",
    "train-steps": "training.steps",
    "local-steps": "training.steps",
    "gradient-accumulation-steps": "training.accumulation",
    "lr-scheduler-type": "training.schedule",
    "num-rounds": "federation.rounds",
    "num-server-rounds": "federation.rounds",
    "per-device-train-batch-size": "training.batch-size",
    "bf16": "dtype",
    "fp16": "dtype",
    "torch-dtype": "dtype",
    "load-in-4bit": "training.base",
    "quantisation": "training.base",
    "quantization": "training.base",
    "gpu": "device",
    "cuda": "device",
    "r": "lora.rank",
    "target-modules": "lora.targets",
    "max-length": "task.max-tokens",
    "max-seq-length": "task.max-tokens",
    "block-size": "data.sequence-length",
    "seqlen": "data.sequence-length",
    "nsamples": "data.num-samples",
    "train-samples": "data.num-samples",
    "dataset": "data.path",
    "dataset-name": "data.path",
    "train-file": "data.path",
    "text-column": "data.field",
    "test-file": "task.test-path",
    "prune-ratio": "pruning.ratio",
    "sparsity-ratio": "pruning.sparsity",
    "prune-method": "method",
    "model-name-or-path": "model",
    "base-model": "model",
    "output-dir": "out-dir",
    "report-to": "tracking",
    "num-supernodes": "num-clients",
    "fraction-fit": "federation.sampled-clients",
    "fraction-train": "federation.sampled-clients",
    "min-fit-clients": "quorum",
    "min-train-nodes": "quorum",
    "min-available-clients": "quorum",
    "secagg": "federation.secure-sum",
    "noise-multiplier": "privacy.epsilon",
}
"""Names of other programs (transformers, peft, Flower, Wanda, others) and the key to use here."""
MOST_LISTED = 40
"""Number of known keys up to which an error lists all of them."""


OF_SITES = frozenset((
    "site", "site-key", "require-site-keys", "peer-keys", "min-secure-sum", "data-path",
    "data-field", "data-columns", "data-group", "data-task", "model-path", "models", "state-dir",
    "num-samples", "own-text", "min-tokens", "min-groups", "allowed-methods", "max-steps",
    "max-batch-tokens", "max-samples", "max-rounds", "max-runs", "max-epsilon", "delta",
    "max-honest-fraction", "max-model-bytes", "pruning-ratio", "models-dir", "capability",
    "require-approval", "keep-days", "device-map", "keep-model",
))  # fmt: skip
"""Keys of a site (``NodeSettings``) that a run does not have."""


def unknown_key(key: str, known: Sequence[str]) -> str:
    """Return the error line for an unknown key, with a suggestion.

    The suggestion is a key of the same name in another table (``pruning-ratio`` also counts as
    ``pruning.ratio``), else one with a similar name in the same table, else the key for a name of
    another program, else one with a similar name in another table, else one whose name is two or
    more words of ``key``, else one that is similar with its table. Without a suggestion the line
    lists the keys of the same table, or all keys, or their tables if there are many.
    """
    # Other programs write underscores.
    written = key.replace("_", "-")
    table, _, name = written.rpartition(".")
    names = {other: other.rpartition(".")[2] for other in known if other != key}
    same_table = [other for other in names if table and other.rpartition(".")[0] == table]
    same_name = [other for other, own in names.items() if name in (own, other.replace(".", "-"))]
    suggestions = (
        same_name
        or [f"{table}.{own}" for own in _similar(name, [names[one] for one in same_table], 0.6)]
        or [other for other in _foreign(name) if other in known]
        or [other for other, own in names.items() if own in _similar(name, names.values(), 0.8)]
        or _within(name, names)
        or _similar(written, _with_similar_name(name, names), 0.6)
    )
    if written in OF_SITES and not same_name:
        return f"{key}: unknown key of a run; it is one of a site, which --node-config gives it"
    if suggestions:
        return f"{key}: unknown key; did you mean '{suggestions[0]}'?"
    return f"{key}: unknown key; known are {_listed(same_table or list(dict.fromkeys(known)))}"


def _listed(known: Sequence[str]) -> str:
    """Return all keys, or if they are many, those without a table and the names of the tables."""
    if len(known) <= MOST_LISTED:
        return ", ".join(known)
    single = [name for name in known if "." not in name]
    tables = dict.fromkeys(name.partition(".")[0] for name in known if "." in name)
    return (
        f"{', '.join(single)}{', and ' if single else ''}keys of the tables {', '.join(tables)};"
        " docs/reference/settings.md describes all"
    )


def _foreign(name: str) -> list[str]:
    """Return the key for a name of another program, also with a word before it (``client-lr``)."""
    found = FOREIGN.get(name) or FOREIGN.get(name.partition("-")[2])
    return [found] if found else []


def _within(name: str, names: Mapping[str, str]) -> list[str]:
    """Return the keys whose own name is two or more words of ``name``; those with most first."""
    found = [other for other, own in names.items() if "-" in own and _words(own) <= _words(name)]
    return sorted(found, key=lambda other: -len(_words(names[other])))


def _with_similar_name(name: str, names: Mapping[str, str]) -> list[str]:
    """Return the keys whose name without its table is similar to ``name``."""
    own = set(difflib.get_close_matches(name, set(names.values()), n=len(names), cutoff=0.5))
    return [other for other in names if names[other] in own]


def _words(name: str) -> set[str]:
    return set(re.split(r"[-_.]", name))


def _similar(word: str, words: Iterable[str], least: float) -> list[str]:
    """Return the most similar of some words, if its similarity (0 to 1) is at least ``least``."""
    return difflib.get_close_matches(word, list(dict.fromkeys(words)), n=1, cutoff=least)
