"""Fuzzing targets: each draws an input, yields, and then processes it as the program does."""

import io
import json
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any, get_args

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from benchmarks.fuzz.headers import changed_blob
from benchmarks.fuzz.mutations import changed_bytes, changed_document, document_bytes, value, word
from benchmarks.fuzz.valid_messages import exchanges, letters
from espalier.environment.bounded_json import read_json
from espalier.errors import InputError
from espalier.hf.tokenizer.rules import KNOWN_PATTERNS, require_known_parts
from espalier.identity.code_hash import bundle_sha256
from espalier.messages.tensor_blobs import tensor_specs, views
from espalier.methods.examples import PLAN
from espalier.methods.pruning.fedspallm import FedSpaLLMSettings
from espalier.models.adapters import adapter_plan
from espalier.settings.keys import default_values, tables
from espalier.settings.node import NodeSettings, parse_node
from espalier.settings.registry import METHODS
from espalier.settings.run import RunSettings, parse
from espalier.settings.table import Table
from espalier.settings.tables.task import tasks
from strategies.base.checkpoint import CheckpointFolder

Target = Callable[[Random], Iterator[None]]
IDENTITY = {"settings": "0" * 64, "model": "1" * 64}
STATE = {
    "mask_blobs": ["2" * 64],
    "clients": [
        {
            "client": 0,
            "status": "completed",
            "reason": "",
            "capability": 1.0,
            "measured": False,
            "metrics": {},
        }
    ],
    "traffic": [[0, 10, 20]],
}


def targets(folder: Path) -> dict[str, Target]:
    """Return all targets by name; those that read files use ``folder``."""
    return {
        "run settings": _run_settings(),
        "node settings": _node_settings,
        "letters": _letters(),
        "blobs": _blobs(),
        "checkpoint": _checkpoint(folder / "checkpoint"),
        "bundles": _bundles(),
        "documents": _documents,
        "tokenizers": _tokenizers(),
    }


# ----- settings -----------------------------------------------------------------------------------


def _choices(table: type[Table]) -> Iterator[str]:
    """Yield every string that is a value of some key."""
    for field in table.model_fields.values():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Table):
            yield from _choices(field.annotation)
        yield from (choice for choice in get_args(field.annotation) if isinstance(choice, str))


def _tables() -> list[type[Table]]:
    return [RunSettings, *tables().values()]


def _run_settings() -> Target:
    defaults = default_values()
    words = sorted({word for kind in _tables() for word in _choices(kind)} | set(tasks()))
    keys = sorted(defaults)

    def target(random: Random) -> Iterator[None]:
        config = dict(defaults) if random.random() < 0.7 else {}
        config["method"] = random.choice(sorted(METHODS))
        for _ in range(random.choice((1, 1, 2, 3, 8))):
            config[random.choice(keys)] = (
                random.choice(words) if random.random() < 0.3 else value(random)
            )
        if random.random() < 0.15:
            config[
                random.choice(("data", "lora", "data.x.y", ".", "", "lora.", word(random)[:100]))
            ] = value(random)
        yield
        settings = parse(config, simulation=random.random() < 0.5)
        settings.digest()
        settings.evaluation.named_texts()
        if isinstance(settings.job, FedSpaLLMSettings):
            settings.job.sparsity_of(2, settings.federation.rounds)
        if settings.tunes:
            adapter_plan(PLAN, settings.lora, settings.num_classes)

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
    settings.state_root()


# ----- messages -----------------------------------------------------------------------------------


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


# ----- files of a resumed run ---------------------------------------------------------------------


def _checkpoint(folder: Path) -> Target:
    checkpoint = CheckpointFolder(folder)
    file = folder / "state.json"
    checkpoint.save(1, {"a": 0}, IDENTITY, STATE)
    document = json.loads(file.read_bytes())

    def target(random: Random) -> Iterator[None]:
        file.write_bytes(document_bytes(random, document))
        yield
        checkpoint.load(IDENTITY)

    return target


# ----- runs and models ----------------------------------------------------------------------------


def _bundles() -> Target:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(3):
            archive.writestr(f"client_app/part{number}.py", f"NUMBER = {number}\n" * 20)
        archive.writestr("pyproject.toml", "[project]\n")
    good = packed.getvalue()

    def target(random: Random) -> Iterator[None]:
        bundle = changed_bytes(random, good)
        # Change numbers in the central directory or its end record.
        if random.random() < 0.5:
            found = bytearray(good)
            start = good.index(b"PK\1\2")
            for _ in range(random.choice((1, 2, 4))):
                place = random.randrange(start, len(found) - 4)
                number = random.choice((0, 1, 2**16, 2**31, 2**32 - 1, random.randrange(2**32)))
                found[place : place + 4] = number.to_bytes(4, "little")
            bundle = bytes(found)
        yield
        try:
            bundle_sha256(bundle)
        except zipfile.BadZipFile as error:
            raise InputError(str(error)) from None

    return target


def _nested(random: Random, depth: int) -> str:
    text = random.choice(("1", '"["', "{}", "", '"', '"\\"', "nul", "[[]]"))
    for _ in range(depth):
        opening, closing = random.choice(
            (("[", "]"), ('{"a":', "}"), ('["]",', "]"), ("[", ""), ('{"\\"[":', "}"), ('"', "]"))
        )
        text = opening + text + closing
    return text


def _documents(random: Random) -> Iterator[None]:
    """Compare ``read_json`` with the standard library: it must read the same or refuse."""
    text = _nested(random, random.choice((0, 1, 3, 30, 63, 64, 65, 200, 5000)))
    data = (
        text if random.random() < 0.5 else text.encode(random.choice(("utf-8", "utf-16", "utf-32")))
    )
    yield
    try:
        found = read_json(data)
    except ValueError as error:
        raise InputError(str(error)) from None
    if found != json.loads(data):
        raise AssertionError("another document was read")


def _tokenizers() -> Target:
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("_"), normalizers.Replace(" ", "_"), normalizers.NFC()]
    )
    words = pre_tokenizers.Split(Regex(KNOWN_PATTERNS[0]), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(use_regex=False)]
    )
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("_", " "), decoders.Fuse()])
    tokenizer.add_special_tokens(["<s>"])
    document = json.loads(tokenizer.to_str())

    def target(random: Random) -> Iterator[None]:
        other = document
        for _ in range(random.choice((0, 1, 1, 2, 4))):
            other = changed_document(random, other)
        yield
        require_known_parts(other, "tokenizer.json")

    return target
