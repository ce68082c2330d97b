"""The ``espalier`` command, one module per subcommand."""

import argparse
from typing import TypeAlias

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""Parsers of the subcommands, to which each module adds its own."""
