"""Check whether a SuperLink's Control API answers at an address."""

PATH = "/v1/control/list-runs"
REFUSED = (403, 404)
"""Status codes of a reverse proxy, or of a server without this API."""
SECONDS = 2.0
"""Seconds for a connection; after that it counts as refused."""


def answers(superlink: str) -> bool:
    """Return whether a Control API answers at the address ``host:port`` that sites use.

    With or without TLS. No certificate is verified, because nothing but an empty request is sent.
    """
    # A server with TLS answers plain HTTP too, with an error that says nothing about its paths.
    for scheme in ("https", "http"):
        if (status := _status(f"{scheme}://{superlink}{PATH}")) is not None:
            return status not in REFUSED
    return False


def _status(url: str) -> int | None:
    import httpx

    try:
        # No proxy: the question is about this machine's own way to the address.
        with httpx.Client(verify=False, timeout=SECONDS, trust_env=False) as client:
            return client.post(url, content=b"").status_code
    except (httpx.HTTPError, OSError):
        # The server speaks gRPC, or there is none.
        return None
