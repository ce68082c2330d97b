"""Centralized baseline of the tuning methods: training on all clients' sequences, in simulation.

It takes as many steps as the clients of all rounds together with their batch size, so it processes
the same number of sequences.
"""

from functools import reduce

from torch import Tensor

from espalier.amounts import count
from espalier.methods.fedpetuning import trained
from espalier.seeds import derive_seed
from espalier.settings.node import simulated_node
from espalier.training.adapter_training import AdapterTraining
from espalier.training.initial_values import initial_adapters
from espalier.training.sequences import client_sequences
from strategies.base.run import Run


def tuned(run: Run) -> dict[str, dict[str, Tensor]]:
    """Train the run's adapters on all clients' sequences.

    Returns
    -------
    dict
        The trained tensors by blob key and canonical name.
    """
    # A simulated node has no data besides the run's [data] table.
    settings = run.settings
    nowhere = simulated_node()
    clients = range(settings.num_clients)
    adapters = trained(run.model.plan, settings)
    training = AdapterTraining(
        model=run.model,
        computing=run.computing,
        settings=settings,
        adapters=adapters,
        sequences=reduce(
            lambda first, other: first.joined(other),
            (client_sequences(settings, nowhere, run.model, client) for client in clients),
        ),
        seed=derive_seed(settings.seed, "training/centralized"),
        parties=settings.federation.clients_of_round(settings.num_clients),
    )
    run.progress.begin("centralized", 1)
    tensors, _ = training.run(initial_adapters(adapters, settings.seed), 0, training.total_steps)
    run.progress.step(
        "centralized",
        f"{count(training.total_steps, 'step')}, {count(training.num_sequences, 'sequence')}",
    )
    return tensors
