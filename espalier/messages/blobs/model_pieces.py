"""Model that the server pushes to clients without one: its files in pieces, each sent at most once.

The server offers a folder by the hashes of its files and pieces. The client answers which pieces it
lacks, so a node that has them already receives nothing. The hash of the folder identifies its whole
content.

Covers: only file names of a Hugging Face model's configuration, tokenizer and safetensors are
accepted. The folder therefore contains no code, and no file is written outside it.
Does not cover: a model that was made to do harm. A site's owner limits its size
(``max-model-bytes``).
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from hashlib import sha256
from typing import Annotated, Any, Literal

from pydantic import Field

from espalier.errors import ProtocolError
from espalier.messages.message import Fields, validate
from espalier.messages.parts import Sha256
from espalier.messages.tensor_blobs import TensorSpec

FILES = re.compile(
    r"(config|generation_config|tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab"
    r"|chat_template)\.json"
    r"|tokenizer\.model|sentencepiece\.bpe\.model|vocab\.txt|merges\.txt|chat_template\.jinja"
    r"|model(-[0-9]{5}-of-[0-9]{5})?\.safetensors|model\.safetensors\.index\.json"
)
"""Permitted names of a model's files."""
MAX_FILES = 1000
"""Maximum number of files."""
MAX_BYTES_BESIDE_WEIGHTS = 1 << 27
"""Maximum size in bytes of a file without weights; the largest tokenizers have a third of it."""
MIN_PIECE_BYTES = 1024
"""Minimum size of a piece, that of ``part-bytes``: a stored piece takes a block of the disk."""
PIECE = "piece"
"""Key of the blob of a piece."""
BYTES = "bytes"
"""Name of the tensor in the blob of a piece."""


class Manifest(Fields):
    """Content of a folder, and fields of its offer: its files, joined and cut into pieces.

    All pieces except the last have ``piece_bytes``.
    """

    what: Literal["model"] = "model"
    names: list[Annotated[str, Field(max_length=64)]] = Field(min_length=1)
    """Names of the files, ascending."""
    sizes: list[Annotated[int, Field(ge=0)]]
    """Size of each file in bytes."""
    file_sha256: list[Sha256]
    """Hexadecimal SHA-256 of each file."""
    piece_bytes: int = Field(ge=MIN_PIECE_BYTES)
    """Size of a piece in bytes."""
    piece_sha256: list[Sha256]
    """Hexadecimal SHA-256 of each piece."""

    @staticmethod
    def offered(fields: Mapping[str, Any]) -> "Manifest":
        """Read the fields of an offer.

        Raises
        ------
        ProtocolError
            See ``require_sound``.
        """
        manifest = validate(Manifest, fields)
        manifest.require_sound()
        return manifest

    @cached_property
    def sha256(self) -> str:
        """Hash over the names, sizes and hashes of the files.

        It does not depend on how the folder is cut into pieces.
        """
        # Pieces are left out: the same files can be cut in several ways.
        return sha256(json.dumps([self.names, self.sizes, self.file_sha256]).encode()).hexdigest()

    @property
    def num_bytes(self) -> int:
        """Total size of all files in bytes."""
        return sum(self.sizes)

    def piece_size(self, index: int) -> int:
        """Return the size of one piece in bytes."""
        return min(self.piece_bytes, self.num_bytes - index * self.piece_bytes)

    def require_sound(self) -> None:
        """Check that the values are consistent and that every file has a permitted name.

        Raises ProtocolError if a check fails, or if a file without weights is too large.
        """
        # Three lists must describe the same files.
        if not len(self.names) == len(self.sizes) == len(self.file_sha256) <= MAX_FILES:
            raise ProtocolError(
                f"Manifest: {len(self.names)} files with {len(self.sizes)} sizes and"
                f" {len(self.file_sha256)} hashes"
            )
        # No path separators and no code: see ``FILES``.
        if self.names != sorted(set(self.names)) or not all(
            FILES.fullmatch(name) for name in self.names
        ):
            raise ProtocolError(
                "Manifest: a file has an invalid file name, or files are not in order"
            )
        if any(
            size > MAX_BYTES_BESIDE_WEIGHTS
            for name, size in zip(self.names, self.sizes, strict=True)
            if not name.endswith(".safetensors")
        ):
            raise ProtocolError(
                f"Manifest: a file without weights has more than {MAX_BYTES_BESIDE_WEIGHTS} bytes"
            )
        # The last piece may be smaller.
        if len(self.piece_sha256) != -(-self.num_bytes // self.piece_bytes):
            raise ProtocolError(
                f"Manifest: {len(self.piece_sha256)} pieces for {self.num_bytes} bytes"
            )


class Lacking(Fields):
    """Fields of the answer to an offer."""

    pieces: list[Annotated[int, Field(ge=0)]]
    """Numbers of the pieces that the client lacks, ascending."""


class Piece(Fields):
    """Fields of a message with one piece."""

    what: Literal["piece"] = "piece"
    model_sha256: Sha256
    """Hash of the folder."""
    index: int = Field(ge=0)
    """Number of the piece."""
    size: int = Field(ge=1)
    """Size of the piece in bytes."""


def piece_specs(piece: Piece) -> dict[str, dict[str, TensorSpec]]:
    """Return the specs of the blob with a piece."""
    return {PIECE: {BYTES: TensorSpec("U8", (piece.size,))}}


def require_pieces(lacking: Sequence[int], offered: int) -> None:
    """Check the answer to an offer.

    Raises ProtocolError if the numbers of pieces are not ascending or not below ``offered``.
    """
    if list(lacking) != sorted(set(lacking)) or (lacking and lacking[-1] >= offered):
        raise ProtocolError(f"Lacking: pieces must be ascending and below {offered}")
