"""Toy method (docs/develop/adding-a-method.md): the smallest method."""
