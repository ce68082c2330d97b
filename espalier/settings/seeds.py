"""Seeds, derived for each purpose from the run's one seed; nothing reads a global random generator."""

import hashlib


def derive_seed(
    seed: int, purpose: str, *, client: int = 0, server_round: int = 0, block: int = 0
) -> int:
    """A 63-bit seed: SHA-256 of the run's seed, the purpose, the client's number, the round and the block."""
    text = f"{seed}/{purpose}/{client}/{server_round}/{block}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
