"""Site policy: methods, sizes and number of runs that a site's owner permits.

It is checked at enrolment, and again before each request is handled.

Covers: a run whose settings exceed the site's limits is refused before anything is opened, with the
key and both numbers. A run is also refused if it exceeds the maximum number of runs with state at
the site (``keep-days``), if others could use the site's name in it (``require-site-keys``), or if
it would exceed the site's privacy budget (``max-epsilon``).

Does not cover: the number of requests within the limits, and a node whose owner deletes its state,
which forgets its runs.
"""

from client_app.protocol.private_answer import SEED_IS_KNOWN, budget_of
from client_app.site import Site
from espalier.errors import InputError
from espalier.messages.message import Header
from espalier.privacy.guarantee import guarantee_of
from espalier.storage.client_state import lineages_of


def require_allowed(site: Site, header: Header) -> None:
    """Raise InputError, with a line for each violated limit, if the policy forbids the run."""
    # All violations are collected, so that the owner sees them at once.
    lines = []
    if not site.node.allows_method(site.settings.method):
        lines.append(
            f"allowed-methods = '{site.node.allowed_methods}': the run's method is"
            f" '{site.settings.method}'"
        )
    max_threads = site.node.max_threads()
    # Threads of the run apply only if the owner sets none.
    if max_threads is not None and site.settings.threads > max_threads:
        lines.append(
            f"threads = {site.settings.threads}: at most {max_threads} are allowed here, unless the"
            " owner sets threads"
        )
    for limit, (setting, amount) in amounts(site, header).items():
        max_amount = site.node.most(limit)
        if max_amount is not None and amount > max_amount:
            lines.append(f"{limit.replace('_', '-')} = {max_amount}: {setting} = {amount}")
    max_runs = site.node.most("max_runs")
    runs = runs_answered(site) if max_runs is not None else set()
    # A run that was answered before may continue.
    if max_runs is not None and header.lineage not in runs and len(runs) >= max_runs:
        lines.append(
            f"max-runs = {max_runs}: this number of runs was already answered within keep-days"
        )
    if site.node.require_site_keys and not site.settings.site_keys:
        lines.append(
            "require-site-keys: in this run anyone could use this site's name; its server must"
            " set site-keys"
        )
    lines += _against_plain_sums(site, header)
    lines += against_privacy(site, header)
    # One error with all lines.
    if lines:
        text = "\n".join(f"  {line}" for line in lines)
        raise InputError(
            "this site does not allow the run; change these values, or ask the site's owner to"
            f" change --node-config:\n{text}"
        )


def _against_plain_sums(site: Site, header: Header) -> list[str]:
    """Return a line for each demand on secure sums that the run does not meet."""
    lines = []
    secure = site.settings.federation.secure_sum
    minimum = site.node.min_secure_sum
    # With sampled clients, a sum has only those of the round.
    num_clients = site.settings.federation.clients_of_round(site.settings.num_clients)
    if minimum and not (secure and num_clients >= minimum):
        why = (
            f"the sum of a round has {num_clients} clients"
            if secure
            else ("the server would see this site's own reply (federation.secure-sum = false)")
        )
        lines.append(f"min-secure-sum = {minimum}: {why}")
    # A server can find a site's texts by the losses of the site's own model on texts of its choice.
    if minimum and site.settings.evaluation.local_baseline:
        lines.append(
            f"min-secure-sum = {minimum}: the losses of this site's own model would leave it"
            " without a sum; the run must set evaluation.local-baseline = false"
        )
    # Samples and pruned weights are nearly the same in each round. If a site drops out of a later
    # one, the difference of the sums is nearly that site's tensors. A server may ask for rounds
    # beyond those that it announced.
    asked = header.server_round if header.kind == "train" else 1
    rounds = max(asked, site.settings.federation.rounds)
    if minimum and site.settings.job.measures_again(rounds):
        lines.append(
            f"min-secure-sum = {minimum}: in {rounds} rounds with the same samples, two sums that"
            " differ by one site could show its tensors; the run must set federation.rounds = 1"
        )
    # Otherwise the server could take part under their names and subtract its own summands.
    if secure and site.node.require_site_keys and not site.node.peer_keys:
        lines.append(
            "require-site-keys: without peer-keys the server could use the names of the other"
            " sites in a secure sum; set peer-keys at this site"
        )
    return lines


NEVER_PRIVATE = ("local_baseline", "evaluate")
"""Kinds of messages whose answers have no noise; a private run sends none."""


def against_privacy(site: Site, header: Header) -> list[str]:
    """Return a line for everything in a run that the site's privacy budget forbids.

    The budget is compared with the whole run before the site takes part. Every answer compares it
    again, when it draws.
    """
    privacy = site.settings.privacy
    max_epsilon = site.node.max_epsilon
    if not privacy.on:
        if not max_epsilon:
            return []
        return [
            f"max-epsilon = {max_epsilon:g}: the run is not differentially private (privacy.epsilon"
            " = 0), so its epsilon has no bound"
        ]
    if header.kind in NEVER_PRIVATE:
        return [f"privacy.epsilon = {privacy.epsilon:g}: {header.kind} has no answer with noise"]
    if privacy.noise == "seed" and not site.node.simulated:
        return [SEED_IS_KNOWN]
    lines = _against_shared_noise(site)
    # The budget is compared with the whole run once, and with each draw later.
    if lines or header.kind != "enrol":
        return lines
    guarantee = guarantee_of(site.settings)
    assert guarantee is not None
    # Draws of all rounds, so that a run is refused before it starts.
    line = budget_of(site).exceeded_by(header.lineage, guarantee.draws)
    return [line] if line else []


def _against_shared_noise(site: Site) -> list[str]:
    """Return a line for each reason for which the site does not rely on the noise of others."""
    node = site.node
    honest_fraction = site.settings.privacy.honest_fraction
    if node.simulated or not honest_fraction:
        return []
    lines = []
    # The owner decides how many other sites have to be honest.
    if honest_fraction > node.max_honest_fraction:
        lines.append(
            f"max-honest-fraction = {node.max_honest_fraction:g}: privacy.honest-fraction ="
            f" {honest_fraction:g}"
        )
    if not node.peer_keys:
        lines.append(
            f"privacy.honest-fraction = {honest_fraction:g}: without peer-keys the server could use"
            " the names of the other sites, and see a sum with too little noise; set peer-keys at"
            " this site"
        )
    return lines


def amounts(site: Site, header: Header) -> dict[str, tuple[str, int]]:
    """Return the setting and the amount that the run requests, by limit."""
    settings = site.settings
    requested = dict(settings.job.asked_of_sites(settings))
    # Other methods have limits of their own.
    if not (settings.tunes or settings.privacy.on or site.node.num_samples):
        requested["max_samples"] = ("data.num-samples", settings.data.num_samples)
    # The number of rounds of other methods follows from the model.
    if "rounds" in settings.job.FEDERATION:
        rounds = settings.job.num_rounds(settings.federation)
        planned = (
            "federation.rounds" if rounds == settings.federation.rounds else "rounds of the run"
        )
        setting = "requested round" if header.server_round > rounds else planned
        # The final result is pushed as if for one more round.
        beyond = 1 if header.kind == "push" else 0
        # A server may ask for more rounds than it announced; the number in the header counts.
        requested["max_rounds"] = (setting, max(rounds, header.server_round - beyond))
    return requested


def runs_answered(site: Site) -> set[str]:
    """Return the names of the runs that count for ``max-runs``."""
    return lineages_of(site.node.state_root(), site.name)
