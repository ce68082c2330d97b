"""Noise that the sites of a secure sum share: how much each adds, and on whom that rests.

In a secure sum the server sees the sum of the sites' tensors, so the noise that hides a record has
to be in the sum and not in each tensor. Sites that are not honest know their own noise, or leave it
out. Let *c* of the run's sites be such sites, and let a sum have at least *t* sites. Then a sum has
the noise of at least t - c honest sites, and each adds 1 / (t - c) of the variance.

Sites that drop out before the sum is complete are not in it; *t* takes them into account. Sites
that drop out later leave their noise in the sum.
"""

import math
from dataclasses import dataclass

MAX_CLIENTS = 100
"""Number of clients up to which all sites of a secure sum exchange shares with all others.

With more, a server that breaks the protocol could wait for keys that surround one site with sites
that work for it, and rebuild that site's masks from their shares.
"""


@dataclass(frozen=True)
class NoiseShare:
    """Part of the noise that each site adds."""

    clients: int
    """Number of sites of the run."""
    honest_fraction: float
    """Fraction of them that are honest, at least."""

    @property
    def dishonest(self) -> int:
        """Number of sites that may work against the others; at least one.

        Each site knows its own noise, so one that is only curious counts.
        """
        # A product such as 10 * 0.7 may lie just below a whole number.
        return max(1, self.clients - math.floor(self.clients * self.honest_fraction + 1e-9))

    @property
    def least_of_sum(self) -> int:
        """Minimum number of sites in a sum: more than two thirds, as in every secure sum."""
        return 2 * self.clients // 3 + 1

    @property
    def honest_in_sum(self) -> int:
        """Minimum number of honest sites in a sum; each adds one divided by it of the variance."""
        return self.least_of_sum - self.dishonest

    @property
    def fault(self) -> str:
        """Why sites cannot share noise with these numbers, in one line; empty if they can.

        Two different sums of a round must not be possible. Each needs ``least_of_sum`` sites that
        confirm it, and an honest site confirms one sum.
        """
        if self.clients > MAX_CLIENTS:
            return (
                f"num-clients = {self.clients}: at most {MAX_CLIENTS} sites can share noise,"
                " because with more each exchanges shares with some of the others only"
            )
        if 2 * self.least_of_sum > self.clients + self.dishonest and self.honest_in_sum > 0:
            return ""
        return (
            f"{self.dishonest} of num-clients = {self.clients} may then be dishonest, and a secure"
            f" sum bears {2 * self.least_of_sum - self.clients - 1} of them"
        )
