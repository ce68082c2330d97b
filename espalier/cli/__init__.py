"""The ``espalier`` command, one module per subcommand."""
