"""The ``espalier`` command."""
