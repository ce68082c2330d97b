"""A method of about a hundred lines (docs/adding-a-method.md): clients send the mean embedding of their text, one vector.

The server averages the vectors and scales what the attention's output reads by the average, a little. It is of no use but to
show which files a method is made of; ``tests/federation/test_toy_method.py`` holds it against the promises of every method.
"""

from espalier.settings.methods import Row

ROW = Row(
    title="Toy (the mean of a vector)",
    settings="toy_method.settings:ToySettings",
    strategy="toy_method.strategy:Toy",
    job="toy_method.job",
    delivery="client_app.delivery:take",
    contracts="toy_method.contracts",
    messages="toy_method.messages:ToyMessages",
    outcome="server_app.outcomes.edited:EditedOutcome",
)
