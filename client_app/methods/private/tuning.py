"""FedPETuning with differential privacy: a round of DP-SGD at a client.

Whatever leaves depends on the client's records only through sums of clipped gradients with noise.
Fields that could tell more are constants: the number of sequences is not sent (weights are equal),
no step is skipped, and the duration is reported as 0.
"""

from client_app.methods.tuning.round_adapters import begins_with, cache_of, keep_blobs
from client_app.protocol.errors import kernel_errors
from client_app.protocol.private_answer import NO_SECONDS, Begin, answer_privately
from client_app.protocol.push import start_blobs, start_hashes
from client_app.site import Site
from espalier.hf.whole.folded_updates import folded_in
from espalier.messages.message import MessageBody, validate
from espalier.methods.tuning.adapters.contract import Order, TuningReport
from espalier.methods.tuning.adapters.tensors import of_round, trained
from espalier.models.adapters import FACTORS, AdapterPlan
from espalier.privacy.accounting import Draw
from espalier.privacy.guarantee import Guarantee
from espalier.storage.client_state import PrivateState
from espalier.training.adapted_model import AdaptedModel, flattened
from espalier.training.private.sequences import private_sequences
from espalier.training.private.steps import PrivateSteps


def train(site: Site, request: MessageBody) -> MessageBody:
    """Train the round's adapters and reply with the first part. Each round is answered once."""
    header = request.header
    order = validate(Order, request.fields)
    adapters = trained(site.model.plan, site.settings, order.rank_limit)

    def tune(state: PrivateState, guarantee: Guarantee, begin: Begin) -> TuningReport:
        draw = guarantee.draw
        start = begins_with(
            site, adapters, start_blobs(site, request), server_round=header.server_round
        )
        sent = of_round(adapters, site.settings, header.server_round)
        # Both factors are loaded, even if only one is trained in this round.
        adapted = site.load(
            site.model,
            site.computing,
            site.settings,
            adapters.with_factors(FACTORS),
            cache_of(site),
        )
        adapted.set(start)
        steps = _steps(site, adapted, sent, draw, header.client)
        # Factors that are not sent must not change either.
        frozen = adapted.frozen(lambda _, name: not sent.trains(name))
        folded = folded_in(adapted.whole, site.model.family, adapters, start)
        with kernel_errors(), frozen, folded:
            # Before noise is drawn: a model without gradients per sequence cannot be trained
            # privately.
            steps.require_gradients_of_sequences()
            # The learning rate schedule continues over the rounds.
            first_step = (header.server_round - 1) * draw.steps
            # From here on the privacy budget is spent.
            steps.run(first_step, draw.steps, begin())
        # What leaves is the result of noisy steps.
        hashes = keep_blobs(
            site, state, header.server_round, adapted.values(), start, order.rank_limit
        )
        return TuningReport(
            seconds=NO_SECONDS,
            samples=0,
            skipped_steps=0,
            rank=order.rank_limit,
            blob_sha256=hashes,
        )

    return answer_privately(site, request, tune, lambda _: dict(start_hashes(site, request)))


def _steps(
    site: Site, adapted: AdaptedModel, sent: AdapterPlan, draw: Draw, client: int
) -> PrivateSteps:
    """Return the training of a client; refuse data that does not suffice."""
    settings = site.settings
    sequences, records = private_sequences(settings, site.node, site.model, client)
    return PrivateSteps(
        model=adapted.whole,
        # Steps of all rounds, for the schedule.
        parameters=flattened(adapted.chosen(lambda _, name: sent.trains(name))),
        settings=settings.training,
        sequences=sequences,
        records=records,
        clip_norm=settings.privacy.clip_norm,
        noise_multiplier=draw.noise_multiplier,
        sampling_rate=draw.sampling_rate,
        max_sequences=settings.privacy.max_sequences,
        total_steps=settings.federation.rounds * settings.training.steps,
    )
