"""Seeds for each purpose, derived from the run's seed; no global random generator is used."""

import hashlib


def derive_seed(
    seed: int, purpose: str, *, client: int = 0, server_round: int = 0, block: int = 0
) -> int:
    """Return a 63-bit seed for one purpose.

    The seed is taken from the SHA-256 hash of the run's seed, the purpose, the client's number, the
    round and the block.
    """
    text = f"{seed}/{purpose}/{client}/{server_round}/{block}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
