"""Check at enrolment that a site's own model and data suffice for the run."""

from client_app.site import Site
from espalier.data.data_protection import not_allowed
from espalier.data.site_data_check import require_enough, require_readable
from espalier.errors import InputError
from espalier.hf.opening.base_check import require_within_limits
from espalier.settings.registry import METHODS, part

NO_MODEL_FROM_OUTSIDE = (
    "max-model-bytes: this site accepts no model from a run's server; its owner can allow it,"
    " with for instance max-model-bytes=8000000000 in --node-config"
)


def require_ready(site: Site) -> None:
    """Raise InputError if the site's own model or data file does not suffice, before it enrols.

    A simulated node has neither; ``espalier run`` has checked its data before. The message is that
    of the round that would fail.
    """
    node = site.node
    if site.settings.evaluation.own_text and not node.allows_own_text():
        raise not_allowed()
    # Refused at once; otherwise the offer after the first round would fail.
    if not site.settings.job.NEEDS_BASE_MODEL and node.max_bytes_of_models() == 0:
        raise InputError(NO_MODEL_FROM_OUTSIDE, NO_MODEL_FROM_OUTSIDE)
    # Without a base model there is no tokenizer either, until the server pushes one.
    if not site.settings.job.NEEDS_BASE_MODEL:
        require_readable(site.settings, node)
        return
    # In a simulation ``espalier run`` has checked the model.
    if node.data_path or node.model_path or not node.simulated:
        require_within_limits(site.settings, site.model)
    require_enough(site.settings, node, site.model.encode)
    # Methods with limits of their own, such as a pruning ratio of the owner.
    if site.settings.job.CHECKS_SITE:
        part(METHODS[site.settings.method].job).require_ready(site)
