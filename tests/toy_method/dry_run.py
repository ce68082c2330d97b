"""Dry run of the toy for ``espalier plan``."""

from server_app.estimate.dry_runs.dry_run import DryRun
from toy_method.strategy import Toy


class DryToy(DryRun, Toy):
    """Dry run of the toy; its messages show nothing of what ``fold`` computes."""
