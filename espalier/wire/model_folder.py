"""A model on its way to clients that have none: its files, cut into pieces, each asked for at most once.

The server offers a folder by the hashes of its files and pieces, and the client answers which pieces it lacks; a node that
holds them already is sent nothing. The hash of the folder names everything that is in it.

Covers: only names that a Hugging Face model has for configuration, tokenizer and safetensors travel, so that a folder holds no
code and reaches no other place of the disk.
Does not cover: what a model does that was made to harm. A site's owner limits its size (``most-model-bytes``).
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Annotated, Literal

from pydantic import Field

from espalier.settings.mistakes import Mistake
from espalier.wire.messages import Scalars
from espalier.wire.parts import Sha256
from espalier.wire.payload import TensorSpec

FILES = re.compile(
    r"(config|generation_config|tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab|chat_template)\.json"
    r"|tokenizer\.model|sentencepiece\.bpe\.model|vocab\.txt|merges\.txt|chat_template\.jinja"
    r"|model(-[0-9]{5}-of-[0-9]{5})?\.safetensors|model\.safetensors\.index\.json"
)
"""Names that a file of a model may have."""
MOST_FILES = 1000
MOST_BYTES_BESIDE_WEIGHTS = 1 << 27
"""Maximum bytes of a file without weights; the largest tokenizers have a third of it."""
PIECE = "piece"
BYTES = "bytes"
"""Key of a piece's blob, and the name of its tensor."""


@dataclass(frozen=True)
class Manifest:
    """What a folder holds: its files one after the other, cut into pieces of ``piece_bytes``, but for the last one."""

    names: tuple[str, ...]
    """Ascending."""
    sizes: tuple[int, ...]
    file_sha256: tuple[str, ...]
    piece_bytes: int
    piece_sha256: tuple[str, ...]

    @cached_property
    def sha256(self) -> str:
        """Hash of the folder: of the names and hashes of its files, however it is cut."""
        return sha256(json.dumps([self.names, self.sizes, self.file_sha256]).encode()).hexdigest()

    @property
    def num_bytes(self) -> int:
        """Of all files."""
        return sum(self.sizes)

    def piece_size(self, index: int) -> int:
        """Bytes of one piece."""
        return min(self.piece_bytes, self.num_bytes - index * self.piece_bytes)

    def require_sound(self) -> None:
        """Raise Mistake unless the numbers fit each other and every file has a name that a file of a model may have."""
        if not len(self.names) == len(self.sizes) == len(self.file_sha256) <= MOST_FILES:
            raise Mistake(
                f"Offer: {len(self.names)} files with {len(self.sizes)} sizes and"
                f" {len(self.file_sha256)} hashes"
            )
        if list(self.names) != sorted(set(self.names)) or not all(
            FILES.fullmatch(name) for name in self.names
        ):
            raise Mistake(
                "Offer: a file has a name that no file of a model has, or files are not in order"
            )
        if any(
            size > MOST_BYTES_BESIDE_WEIGHTS
            for name, size in zip(self.names, self.sizes, strict=True)
            if not name.endswith(".safetensors")
        ):
            raise Mistake(
                f"Offer: a file without weights has more than {MOST_BYTES_BESIDE_WEIGHTS} bytes"
            )
        if len(self.piece_sha256) != -(-self.num_bytes // self.piece_bytes):
            raise Mistake(f"Offer: {len(self.piece_sha256)} pieces for {self.num_bytes} bytes")


class Offer(Scalars):
    """A model that a client is to have."""

    what: Literal["model"] = "model"
    names: list[Annotated[str, Field(max_length=64)]] = Field(min_length=1)
    sizes: list[Annotated[int, Field(ge=0)]]
    file_sha256: list[Sha256]
    piece_bytes: int = Field(ge=1)
    piece_sha256: list[Sha256]

    @staticmethod
    def of(manifest: Manifest) -> "Offer":
        """What offers a folder."""
        return Offer(
            names=list(manifest.names),
            sizes=list(manifest.sizes),
            file_sha256=list(manifest.file_sha256),
            piece_bytes=manifest.piece_bytes,
            piece_sha256=list(manifest.piece_sha256),
        )

    def manifest(self) -> Manifest:
        """The folder that is offered.

        Raises
        ------
        Mistake
            See ``Manifest.require_sound``.
        """
        found = Manifest(
            tuple(self.names),
            tuple(self.sizes),
            tuple(self.file_sha256),
            self.piece_bytes,
            tuple(self.piece_sha256),
        )
        found.require_sound()
        return found


class Lacking(Scalars):
    """A client's answer to an offer."""

    pieces: list[Annotated[int, Field(ge=0)]]
    """Pieces that it does not have, ascending."""


class Piece(Scalars):
    """One piece, which comes along."""

    what: Literal["piece"] = "piece"
    model_sha256: Sha256
    index: int = Field(ge=0)
    size: int = Field(ge=1)


def piece_specs(piece: Piece) -> dict[str, dict[str, TensorSpec]]:
    """The blob that holds a piece."""
    return {PIECE: {BYTES: TensorSpec("U8", (piece.size,))}}


def require_pieces(lacking: Sequence[int], offered: int) -> None:
    """Raise Mistake unless these are numbers of pieces, ascending."""
    if list(lacking) != sorted(set(lacking)) or (lacking and lacking[-1] >= offered):
        raise Mistake(f"Lacking: pieces must be ascending and below {offered}")
