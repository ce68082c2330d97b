"""Upload of an export to the Hugging Face hub, by the hub's own library."""

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from espalier.environment.bounded_json import read_json_object
from espalier.environment.hub_models import ADAPTER, NAME
from espalier.errors import InputError
from espalier.results.export.card import FRONT, base_on_hub
from espalier.results.sources import Source

LICENCE = re.compile(r"^license: *([\w.-]+) *$", re.MULTILINE)


@dataclass
class Upload:
    """Upload to one repository; everything is checked before anything is sent."""

    repository: str
    token: str
    license_name: str = field(default="", init=False)
    """Licence for the card, such as ``apache-2.0``."""

    def take(self, source: Source, *, as_adapter: bool, license_name: str) -> None:
        """Check what is uploaded, and find its licence.

        Raises InputError if the licence of the base model is not known, or an adapter names a local
        base model.
        """
        base = base_on_hub(source)
        if as_adapter:
            named = read_json_object(source.folder / ADAPTER).get("base_model_name_or_path")
            if not base or named != base:
                raise InputError(
                    f"--adapter: the base model of the adapter is {named!r} on this machine, where"
                    " others cannot load it; leave out --adapter to upload the merged model"
                )
        self.license_name = license_name or _licence_of(source, base, self.token)


def prepared(repository: str) -> Upload:
    """Return an upload, after checking that one is possible.

    Raises InputError if no repository is named, the hub's library is offline, or no account is
    known.
    """
    from huggingface_hub import constants, get_token

    if not repository:
        raise InputError("--to hub: needs --repository OWNER/NAME, the repository to write to")
    name = NAME.fullmatch(repository)
    if name is None or name[2] is not None:
        raise InputError(
            f"--repository {repository!r}: must be OWNER/NAME, the repository to write to"
        )
    if constants.HF_HUB_OFFLINE:
        raise InputError(
            "--to hub: HF_HUB_OFFLINE is set, so nothing is sent to the Hugging Face hub; unset it"
            " to upload, or export with --to transformers"
        )
    token = get_token()
    if not token:
        raise InputError(
            "--to hub: no account is known; run `hf auth login`, or set HF_TOKEN to a token that"
            " may write"
        )
    return Upload(repository, token)


def _licence_of(source: Source, base: str, token: str) -> str:
    """Return the licence that the base model's card names: its file's, or its page's on the hub."""
    places = [Path(link.path) for link in source.chain]
    for folder in (source.model.directory, *(place for place in places if place.is_absolute())):
        card = folder / "README.md"
        if card.is_file() and (front := FRONT.match(card.read_text(encoding="utf-8"))):
            if found := LICENCE.search(front[0]):
                return found[1]
    if base:
        from huggingface_hub import HfApi

        try:
            card_data = HfApi().model_info(base, token=token).card_data
        # The library raises errors of many types, also those of the library for HTTP.
        except Exception as error:
            raise InputError(
                f"--to hub: the card of the base model {base} cannot be read ({error}); name its"
                " licence with --license"
            ) from None
        if card_data is not None and isinstance(card_data.license, str):
            return card_data.license
    raise InputError(
        "--to hub: the licence of the base model is not known; name it with --license, for"
        " instance --license apache-2.0"
    )


def push(upload: Upload, folder: Path, *, private: bool) -> str:
    """Create the repository if it is missing, upload a folder, and return its address.

    Raises InputError if the hub refuses, or cannot be reached.
    """
    from huggingface_hub import HfApi

    api = HfApi(token=upload.token)
    try:
        api.create_repo(upload.repository, private=private, exist_ok=True)
        commit = api.upload_folder(
            repo_id=upload.repository, folder_path=folder, commit_message="Upload with Espalier"
        )
    # The library raises errors of many types, also those of the library for HTTP.
    except Exception as error:
        raise InputError(
            f"--repository {upload.repository}: the upload failed ({error}); what was to be"
            f" uploaded is in {folder}; `hf upload {upload.repository} {shlex.quote(str(folder))}"
            f"{' --private' if private else ''}` sends it"
        ) from None
    return str(commit.commit_url)
