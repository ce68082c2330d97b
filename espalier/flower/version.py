"""Version of the installed Flower, and differences between versions."""

from importlib.metadata import version

ONE_PORT = (1, 40)
"""First release in which all APIs of a SuperLink share one port, and SuperNodes use HTTP."""


def installed() -> tuple[int, int]:
    """Return the major and minor version of the installed Flower."""
    major, minor = version("flwr").split(".")[:2]
    return int(major), int(minor)


def sites_share_port(flower: tuple[int, int] | None = None) -> bool:
    """Return whether sites reach a SuperLink on the port of its Control API.

    Before 1.40 SuperNodes use gRPC on a separate port (``--fleet-api-address``). Since then
    everybody who reaches the sites' port also reaches the Control API, which has no authentication.

    Parameters
    ----------
    flower : major and minor version; None: the installed one
    """
    return (flower or installed()) >= ONE_PORT
