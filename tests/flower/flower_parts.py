"""Private parts of Flower with which tests compare; outside ``tests/flower`` nothing else has any.

Tests of what the project itself replaces in Flower are in ``tests/flower``.
"""

from flwr.cli.app import app as flwr_command
from flwr.cli.build import build_fab_from_disk
from flwr.cli.flower_config import parse_superlink_connection
from flwr.cli.supernode.register import try_load_public_key
from flwr.common.config import parse_config_args
from flwr.common.constant import ErrorCode
from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode as supernode_parser
from flwr.supernode.cli.flower_supernode import (
    _try_setup_client_authentication as client_authentication,
)

__all__ = [
    "ErrorCode",
    "build_fab_from_disk",
    "client_authentication",
    "flwr_command",
    "parse_config_args",
    "parse_superlink_connection",
    "supernode_parser",
    "try_load_public_key",
]
