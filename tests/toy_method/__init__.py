"""Toy method of about 100 lines (docs/adding-a-method.md).

Clients send the mean embedding of their text, one vector. The server averages the vectors and
slightly scales the inputs of the attention's query matrices by the average. The method only shows
which files a method consists of. ``tests/federation/test_toy_method.py`` checks the promises of
every method for it.
"""

from espalier.settings.methods import Row

ROW = Row(
    title="Toy (the mean of a vector)",
    settings="toy_method.settings:ToySettings",
    strategy="toy_method.strategy:Toy",
    job="toy_method.job",
    delivery="client_app.protocol.push:take",
    contracts="toy_method.contracts",
    dry_run="toy_method.dry_run:DryToy",
    outcome="server_app.artifacts.edited_model:EditedOutcome",
)
