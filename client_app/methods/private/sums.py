"""Pooled pruning with differential privacy: noisy sums over records at a client.

Nothing else about the client's records leaves: there is no count, and the reported duration is 0.
If sites share the noise of a secure sum, these sums have only the client's share of it. They then
leave the site masked, and only in a sum with enough sites (``client_app.protocol.secure_sum``).
"""

from client_app.protocol.private_answer import NO_SECONDS, Begin, answer_privately
from client_app.site import Site
from espalier.data.privacy_units import padded, record_sequences
from espalier.hf.stream.block_stream import BlockStream
from espalier.hf.stream.private_sums import PrivateSums
from espalier.messages.message import MessageBody
from espalier.messages.parts import Report
from espalier.privacy.guarantee import Guarantee
from espalier.storage.client_state import PrivateState


def train(site: Site, request: MessageBody) -> MessageBody:
    """Reply with the first part of the noisy sums. Each round is answered once."""
    header = request.header

    def work(state: PrivateState, guarantee: Guarantee, begin: Begin) -> Report:
        sequences = record_sequences(site.settings, site.node, site.model.encode, header.client)
        stream = BlockStream(site.model, site.computing)
        bits = begin()
        records = []
        chosen = []
        # Poisson sampling: each record takes part with this probability, independently of the
        # others.
        for record in bits.sampled(len(sequences), guarantee.draw.sampling_rate):
            max_sequences = site.settings.privacy.max_sequences
            # A record contributes a bounded number of sequences.
            for place in bits.chosen(range(len(sequences[record])), max_sequences):
                records.append(record)
                chosen.append(sequences[record][place])
        samples, lengths = padded(chosen, site.settings.data.sequence_length)
        sums = PrivateSums(stream, guarantee.site_multiplier, bits)
        store = state.blobs(header.server_round)
        hashes = [store.put(blob) for blob in sums.blobs(samples, lengths, records)]
        return Report(seconds=NO_SECONDS, blob_sha256=hashes)

    return answer_privately(site, request, work)
