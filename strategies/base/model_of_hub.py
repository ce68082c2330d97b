"""Download of a run's model of the hub, the weights last."""

from espalier.environment.hub_models import download_model, has_some_weights, is_on_hub
from espalier.hf.opening.config_only_model import opened
from espalier.settings.run import RunSettings
from strategies.base.method import require_fit


def with_downloaded_model(settings: RunSettings) -> RunSettings:
    """Return the settings with the commit of their model, after its download if it is of the hub.

    Raises
    ------
    InputError
        The model cannot be downloaded, or is of a kind with which the method cannot work; in the
        latter case no weights were downloaded.
    """
    if not is_on_hub(settings.model):
        return settings
    pinned = download_model(settings.model, weights=False)
    if not has_some_weights(pinned):
        with opened(pinned) as model:
            require_fit(settings, model, {})
    return settings.model_copy(update={"model": download_model(pinned)})
