"""Row of the registry for a method that averages adapters, with what these methods share."""

from functools import partial

from espalier.settings.registry import Row

averaging_row = partial(
    Row,
    contracts="espalier.methods.tuning.adapters.contract",
    job="client_app.methods.tuning.adapter_averaging",
    dry_run="server_app.estimate.messages.tuning:DryTuning",
    work="server_app.estimate.work.tuning:Tuned",
    outcome="server_app.artifacts.adapters:AdapterOutcome",
    baseline="strategies.baselines:tuned",
    tunes=True,
    measured_by_round=True,
)
"""``Row`` whose parts are those of adapter averaging, unless others are given."""
