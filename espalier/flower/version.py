"""The version of Flower that is installed, and what hangs on it."""

from importlib.metadata import version

ONE_PORT = (1, 40)
"""From this release on all APIs of a SuperLink share one port, and SuperNodes speak HTTP with it."""


def installed() -> tuple[int, int]:
    """Return major and minor number of the installed Flower."""
    major, minor = version("flwr").split(".")[:2]
    return int(major), int(minor)


def sites_share_port(flower: tuple[int, int] | None = None) -> bool:
    """Return whether sites reach a SuperLink on the port over which runs are started.

    Before 1.40 SuperNodes speak gRPC on a port of its own (``--fleet-api-address``). Since then whoever reaches the sites' port
    also reaches the Control API, which asks nobody who they are.

    Parameters
    ----------
    flower : major and minor number; None: of the installed one
    """
    return (flower or installed()) >= ONE_PORT
