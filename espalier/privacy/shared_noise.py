"""Noise that sites share in a secure sum: each adds a part, and the sum has enough for all.

With secure sums the server sees only the sum of all sites. The noise that protects a record must be
in the sum, so each of n sites adds Gaussian noise with 1/n of the variance. Sites that leave out
their noise, or know it and subtract it, take their part away. So each adds 1/(h n) of the variance
if at least a fraction h of the sites that the sum contains is honest and keeps its noise secret.
Sums of rounded Gaussians are not a rounded Gaussian; the difference is below one step of the grid
for each site, which is 2^-40 of the clipping bound, while the noise is of the order of the bound.

Covers: colluding sites and the server together, as long as the honest fraction holds.

Does not cover: sites that drop out after the sum was fixed, unless they are counted as not honest.
The protocol of secure sums is not connected to this yet; every site adds all of its own noise.
"""

import math

from espalier.errors import InputError


def deviation_of_site(deviation: float, sites: int, honest_fraction: float) -> float:
    """Return the standard deviation of the noise of one of several sites.

    Parameters
    ----------
    deviation : standard deviation that the sum must have at least
    sites : number of sites in the sum
    honest_fraction : fraction of the sites whose noise the attacker does not know

    Raises
    ------
    InputError
        The fraction is not above 0 and at most 1, or no whole site is honest.
    """
    return deviation / math.sqrt(honest_sites(sites, honest_fraction))


def honest_sites(sites: int, honest_fraction: float) -> int:
    """Return the number of sites that are honest at least, rounded down.

    Raises
    ------
    InputError
        The fraction is not above 0 and at most 1, or no whole site is honest.
    """
    if not 0 < honest_fraction <= 1:
        raise InputError(
            f"honest fraction {honest_fraction:g}: is not above 0 and at most 1; name the fraction of"
            " sites that keep their noise secret"
        )
    # A product such as 10 * 0.7 may lie just below a whole number.
    honest = math.floor(sites * honest_fraction + 1e-9)
    if honest < 1:
        raise InputError(
            f"honest fraction {honest_fraction:g} of {sites} sites: is no whole site; share the noise"
            " among more sites, or let each site add all of it"
        )
    return honest


def noise_multiplier_of_sum(
    own_multiplier: float, sites: int, dropped: int, dishonest: int
) -> float:
    """Return the noise multiplier of a sum that some sites left, and in which some are dishonest.

    Parameters
    ----------
    own_multiplier : standard deviation of one site's noise divided by the sensitivity
    sites : number of sites that shared the noise
    dropped : number of sites that the sum does not contain
    dishonest : number of sites in the sum whose noise the attacker knows
    """
    left = sites - dropped - dishonest
    return own_multiplier * math.sqrt(max(0, left))
