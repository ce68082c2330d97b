"""What is fuzzed: each target draws an input, stops at a ``yield``, and then does with it what the program does."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any, get_args

from benchmarks.fuzz.headers import changed_blob
from benchmarks.fuzz.letters import exchanges, letters
from benchmarks.fuzz.mutations import document_bytes, value, word
from espalier.settings.fedspallm import FedSpaLLMSettings
from espalier.settings.node import NodeSettings, parse_node, site_id
from espalier.settings.run import METHODS, RunSettings, default_values, parse, tables
from espalier.settings.table import Table
from espalier.wire.adapters import adapter_plan
from espalier.wire.examples import PLAN
from espalier.wire.payload import tensor_specs, views
from strategies.engine.checkpoint import CheckpointFolder

Target = Callable[[Random], Iterator[None]]
IDENTITY = {"settings": "0" * 64, "model": "1" * 64}
STATE = {
    "mask_blobs": ["2" * 64],
    "clients": [{"client": 0, "status": "completed", "reason": "", "capability": 1.0, "measured": False, "metrics": {}}],
    "traffic": [[0, 10, 20]],
}


def targets(folder: Path) -> dict[str, Target]:
    """All targets by name; those that read files do so in ``folder``."""
    return {
        "run settings": _run_settings(),
        "node settings": _node_settings,
        "letters": _letters(),
        "blobs": _blobs(),
        "checkpoint": _checkpoint(folder / "checkpoint"),
    }


# ----- settings -------------------------------------------------------------------------------------------------------


def _choices(table: type[Table]) -> Iterator[str]:
    """Every word that is a value of some key."""
    for field in table.model_fields.values():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Table):
            yield from _choices(field.annotation)
        yield from (choice for choice in get_args(field.annotation) if isinstance(choice, str))


def _tables() -> list[type[Table]]:
    return [RunSettings, *tables().values()]


def _run_settings() -> Target:
    defaults, words = default_values(), sorted({word for kind in _tables() for word in _choices(kind)})
    keys = sorted(defaults)

    def target(random: Random) -> Iterator[None]:
        config = dict(defaults) if random.random() < 0.7 else {}
        config["method"] = random.choice(sorted(METHODS))
        for _ in range(random.choice((1, 1, 2, 3, 8))):
            config[random.choice(keys)] = random.choice(words) if random.random() < 0.3 else value(random)
        if random.random() < 0.15:
            config[random.choice(("data", "lora", "data.x.y", ".", "", "lora.", word(random)[:100]))] = value(random)
        yield
        settings = parse(config, simulation=random.random() < 0.5)
        settings.digest()
        settings.evaluation.named_texts()
        if isinstance(settings.job, FedSpaLLMSettings):
            settings.job.sparsity_of(2, settings.federation.rounds)
        if settings.tunes:
            adapter_plan(PLAN, settings.lora, settings.task.num_classes)

    return target


def _node_settings(random: Random) -> Iterator[None]:
    keys = [field.alias or name for name, field in NodeSettings.model_fields.items()]
    config: dict[str, Any] = {"site": "hospital-a"} if random.random() < 0.8 else {}
    for _ in range(random.choice((1, 1, 2, 3, 6))):
        key = random.choice(keys) if random.random() < 0.9 else word(random)[:100]
        paths = key.endswith(("-path", "-dir")) and random.random() < 0.7
        config[key] = word(random) if paths else value(random)
    yield
    settings = parse_node(config)
    site_id(settings)
    settings.state_root()
    settings.file_format()


# ----- messages -------------------------------------------------------------------------------------------------------


def _letters() -> Target:
    known = exchanges()
    return lambda random: letters(random, known)


def _blobs() -> Target:
    good = [blob for exchange in exchanges() for blob in exchange.reply.blobs.values()]

    def target(random: Random) -> Iterator[None]:
        blob = changed_blob(random, random.choice(good))
        yield
        tensor_specs(blob)
        views(blob)

    return target


# ----- files that a run goes on from ----------------------------------------------------------------------------------


def _checkpoint(folder: Path) -> Target:
    checkpoint, file = CheckpointFolder(folder), folder / "state.json"
    checkpoint.save(1, {"a": 0}, IDENTITY, STATE)
    document = json.loads(file.read_bytes())

    def target(random: Random) -> Iterator[None]:
        file.write_bytes(document_bytes(random, document))
        yield
        checkpoint.load(IDENTITY)

    return target
