"""Check whether the Hugging Face hub can be reached, once and soon.

Its libraries ask a hub that cannot be reached six times for every file, with growing pauses.
"""

import os
import sys
import urllib.error
import urllib.request
from http.client import HTTPException

ENDPOINT = "https://huggingface.co"
SECONDS = 20.0
OFFLINE = "HF_HUB_OFFLINE"


def use_cache_if_unreachable() -> None:
    """Set ``HF_HUB_OFFLINE`` and say so if the hub does not answer within 20 seconds.

    Nothing is asked if the variable is set. The hub's libraries read it when they are imported, so
    call this before. ``HF_ENDPOINT`` and the variables of proxies are honoured, and every answer
    counts, also an error.
    """
    if OFFLINE in os.environ:
        return
    endpoint = os.environ.get("HF_ENDPOINT", ENDPOINT)
    try:
        request = urllib.request.Request(endpoint, method="HEAD")
        urllib.request.urlopen(request, timeout=SECONDS).close()
    except urllib.error.HTTPError:
        return
    except (OSError, ValueError, HTTPException) as error:
        reason = getattr(error, "reason", error)
        print(
            f"The Hugging Face hub ({endpoint}) cannot be reached ({reason}); only what its cache"
            " has is used.",
            file=sys.stderr,
            flush=True,
        )
        os.environ[OFFLINE] = "1"
