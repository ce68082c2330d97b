"""Model that a site receives from the server in pieces and reuses in later runs (``model_folder``).

Covers: in one run a site accepts one model, so that no request is repeated with another model or
tokenizer. A real site accepts a model only if its owner permits it and limits the total size
(``max-model-bytes``). The size of an offer counts before its pieces arrive, and at most that size
plus one piece is on the disk at any time.

Does not cover: the content of the model. A site that accepts a model trains on whatever the server
sends.
"""

from client_app.model_folder import MODEL, ModelFolder, offered_sha256, reserve
from client_app.site import Site, reply_to
from espalier.errors import InputError, StateLost
from espalier.messages.blobs.model_pieces import BYTES, PIECE, Lacking, Manifest, Piece
from espalier.messages.message import MessageBody, NoFields, validate
from espalier.messages.tensor_blobs import views
from espalier.storage.blobs import sha256
from espalier.storage.directory_lock import in_turn


def take_offer(site: Site, request: MessageBody) -> MessageBody:
    """Answer an offer of a model with the indices of the pieces that are missing here.

    Raises InputError if the model is larger than the site's owner permits, or if another model was
    offered in this run.
    """
    manifest = Manifest.offered(request.fields)
    state = site.state(request.header)
    with state.locked():
        # One model per run, as in the module's docstring.
        if offered_sha256(state) not in ("", manifest.sha256):
            raise InputError(
                "push: the server offered this site another model before in this run; start a"
                " new run"
            )
        reserve(site.node, manifest)
        kept = ModelFolder(site.node.state_root(), manifest.sha256)
        # The offer is stored before pieces arrive, so a restarted node knows what to expect.
        state.save_lasting(MODEL, {"sha256": manifest.sha256, "offer": request.fields})
    with in_turn(kept.folder):
        # Delete pieces from another division of the same files.
        kept.store.keep_only(manifest.piece_sha256)
        if kept.is_sound():
            return reply_to(request, Lacking(pieces=[]))
        # Files that are not sound are of no use; pieces may be.
        kept.remove_files()
        missing = kept.lacking(manifest)
        # All pieces are there from an interrupted attempt.
        if not missing:
            kept.put_together(manifest)
    return reply_to(request, Lacking(pieces=missing))


def take_piece(site: Site, request: MessageBody) -> MessageBody:
    """Store a piece of the offered model; after the last piece, build and check the files.

    Raises StateLost if this model was not offered here, or the offer is gone, and InputError if the
    bytes do not have the size or the hash in the offer.
    """
    piece = validate(Piece, request.fields)
    state = site.state(request.header)
    offered = state.load_lasting(MODEL)
    if offered is None or offered["sha256"] != piece.model_sha256:
        raise StateLost(
            "push: this piece is of a model that the server did not offer; offer the model first"
        )
    manifest = Manifest.offered(offered["offer"])
    # Reserve again: the room of an unfinished model may have been given to others meanwhile.
    reserve(site.node, manifest)
    kept = ModelFolder(site.node.state_root(), piece.model_sha256)
    data = views(request.blobs[PIECE])[BYTES].tobytes()
    # Size before hash: a huge piece is refused without hashing it.
    if piece.index >= len(manifest.piece_sha256) or len(data) != manifest.piece_size(piece.index):
        raise InputError(f"push: piece {piece.index} does not have the size in the offer")
    if sha256(data) != manifest.piece_sha256[piece.index]:
        raise InputError(f"push: piece {piece.index} does not have the hash in the offer")
    # Another run at this site may download the same model.
    with in_turn(kept.folder):
        if not kept.is_sound():
            if kept.store.num_bytes() + len(data) > manifest.num_bytes:
                # Delete pieces from another division of the same files.
                kept.store.keep_only(manifest.piece_sha256)
            kept.store.put(data)
            # Damage is detected when the pieces are read.
            if all(kept.store.has(digest) for digest in manifest.piece_sha256):
                kept.put_together(manifest)
    return reply_to(request, NoFields())
