"""Toy method (docs/develop/adding-a-method.md): its row in the table of methods."""

from espalier.settings.methods import Row

ROW = Row(
    title="Toy (the mean of a vector)",
    settings="tests.toy_method.contract:ToySettings",
    job="tests.toy_method.client",
    strategy="tests.toy_method.strategy:Toy",
)
