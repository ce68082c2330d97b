"""Models of the Hugging Face hub: their names, the files that are read, and their download.

The hub's own library downloads them to its cache (``HF_HOME``), with the user's token
(``HF_TOKEN``), or only finds them there (``HF_HUB_OFFLINE``).
"""

import re
from collections.abc import Sequence
from pathlib import Path

from espalier.environment.bounded_json import read_json_object
from espalier.environment.paths import at_home
from espalier.errors import InputError, first_line

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
"""Index that names the weight files of a sharded model; ``SINGLE`` takes precedence over it."""
WRITE_AGAIN = "write the model again with save_pretrained"
ADAPTER = "adapter_config.json"
KNOWN = {
    "config.json",
    "structure.json",
    "modeling_structured.py",
    "modeling_sliced.py",
    "generation_config.json",
    INDEX,
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "sentencepiece.bpe.model",
    "spiece.model",
    "tekken.json",
    "chat_template.jinja",
    "chat_template.json",
}
"""Names of configuration, tokenizer and chat template files, and files of pruned models."""
FURTHER_TEMPLATES = "additional_chat_templates"
"""Directory of further chat templates, ``*.jinja``."""
LICENCES = [
    f"{stem}{ending}"
    for stem in ("LICENSE", "LICENCE", "license", "NOTICE", "COPYING", "USE_POLICY")
    for ending in ("", ".txt", ".md")
]
BESIDE_WEIGHTS = (*sorted(KNOWN), ADAPTER, f"{FURTHER_TEMPLATES}/*.jinja", *LICENCES)
"""Files that are downloaded with the weights; a directory with ``ADAPTER`` is refused later."""

NAME = re.compile(r"([\w-][\w.-]*/[\w-][\w.-]*)(?:@((?!.*\.\.)[\w-][\w./-]*))?")
"""Pattern of ``owner/name`` or ``owner/name@revision``."""

COMMIT = re.compile("[0-9a-f]{40}")
"""Pattern of a revision that always means the same files."""


def hub_name(name: str) -> tuple[str, str] | None:
    """Return repository and revision of ``owner/name[@revision]``; None for another text."""
    match = NAME.fullmatch(name)
    return (match[1], match[2] or "main") if match else None


def is_on_hub(name: str) -> bool:
    """Return whether ``model`` names a model of the hub.

    An existing path of that name wins. A name in a directory of runs is a mistyped run.
    """
    path = at_home(name)
    if hub_name(name) is None or path.exists():
        return False
    return not any(path.parent.glob("*/summary.json"))


def cached_model(name: str) -> Path:
    """Return the directory of a model in the hub's cache, without a connection.

    Raises InputError if the cache has no copy of this revision.

    Parameters
    ----------
    name : ``owner/name[@revision]``
    """
    from huggingface_hub import constants, try_to_load_from_cache

    repository, revision = _parts(name)
    path = try_to_load_from_cache(repository, "config.json", revision=revision)
    if not isinstance(path, str):
        raise InputError(
            f"model = {name!r}: there is no such directory on this machine, and the cache of the"
            f" Hugging Face hub ({constants.HF_HUB_CACHE}) has no copy of such a model; download it"
            f" (hf download {repository} --revision {revision}), or name a directory"
        )
    return Path(path).parent


def download_model(name: str, *, weights: bool = True) -> str:
    """Download what is missing of a model; return its name with the commit: ``owner/name@hash``.

    Only files that transformers reads from a model directory are downloaded: configuration,
    tokenizer, licence, and weights in safetensors format.

    Parameters
    ----------
    name : ``owner/name[@revision]``
    weights : whether weights are needed

    Raises
    ------
    InputError
        The hub has no such repository or revision, does not let this user read it, or cannot be
        reached, and its cache has no complete copy; or the model has no weights in safetensors
        format.
    """
    repository, _ = _parts(name)
    folder = _download(name, (*BESIDE_WEIGHTS, SINGLE) if weights else BESIDE_WEIGHTS)
    pinned = f"{repository}@{folder.name}"
    if weights and not (folder / SINGLE).exists():
        if not (folder / INDEX).exists():
            raise InputError(
                f"model = {name!r}: the repository on the Hugging Face hub has neither {SINGLE} nor"
                f" {INDEX}; name a model in safetensors format, or {WRITE_AGAIN}"
            )
        _download(pinned, shard_names(folder / INDEX))
    return pinned


def has_some_weights(name: str) -> bool:
    """Return whether the hub's cache has a weight file of a model.

    Parameters
    ----------
    name : ``owner/name@revision`` of a model whose configuration is there
    """
    return any(cached_model(name).glob("*.safetensors"))


def _download(name: str, files: Sequence[str]) -> Path:
    """Download files of a repository, given by name or pattern, and return their directory."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    repository, revision = _parts(name)
    page = f"{constants.ENDPOINT}/{repository}"
    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=list(files)))
    except GatedRepoError:
        reason = (
            f"is gated; accept its terms at {page}, and set HF_TOKEN to a token of your account"
        )
    except RepositoryNotFoundError:
        reason = (
            f"({page}) does not exist, or is private; correct the name, or set HF_TOKEN to a token"
            " of an account that may read it"
        )
    except RevisionNotFoundError:
        reason = f"has no revision {revision!r}; name a branch, a tag or a commit of {page}"
    # The library raises errors of many types, also those of the library for HTTP.
    except Exception as error:
        if constants.HF_HUB_OFFLINE:
            reason = (
                f"has no complete copy in {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE is set;"
                " unset it, or name the directory of a copy"
            )
        else:
            reason = (
                f"({page}) cannot be downloaded to {constants.HF_HUB_CACHE}"
                f" ({type(error).__name__}: {first_line(error)}); try again when the hub can be"
                " reached, or name the directory of a copy"
            )
    raise InputError(
        f"model = {name!r}: there is no such directory, and the model on the Hugging Face hub"
        f" {reason}"
    )


def _parts(name: str) -> tuple[str, str]:
    parts = hub_name(name)
    assert parts is not None
    return parts


def shard_names(index: Path) -> list[str]:
    """Return the names of the weight files that an index names, sorted.

    Raises InputError if the index is damaged, or names files outside its directory.
    """
    document = read_json_object(index)
    weight_map = document.get("weight_map")
    # transformers fails without the key "metadata".
    if not isinstance(weight_map, dict) or "metadata" not in document:
        raise InputError(f"{index}: has no 'weight_map' or no 'metadata'; {WRITE_AGAIN}")
    names = sorted({str(name) for name in weight_map.values()})
    if others := [name for name in names if Path(name).name != name]:
        raise InputError(
            f"{index}: names {others[0]!r}; the files must be in the directory of the index"
        )
    return names
