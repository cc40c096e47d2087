"""Whether the Hub can be reached, asked once and quickly.

huggingface_hub tries an unreachable Hub again for half a minute. A misspelled name on a machine
without a network is to be answered at once.
"""

from __future__ import annotations

import contextlib
import os
import socket
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Final

__all__ = ["cache_only_when_unreachable", "is_reachable"]

_PATIENCE_S: Final = 3.0


def is_reachable(endpoint: str) -> bool:
    """Whether a connection to a server can be made. With a proxy this is unknown: True."""
    if urllib.request.getproxies():
        return True
    url = urllib.parse.urlsplit(endpoint)
    port = url.port or (443 if url.scheme == "https" else 80)
    try:
        socket.create_connection((url.hostname or "", port), _PATIENCE_S).close()
    except OSError:
        return False
    return True


@contextlib.contextmanager
def cache_only_when_unreachable(path_or_repo: str) -> Iterator[None]:
    """Meanwhile huggingface_hub looks in its cache alone, if the Hub cannot be reached."""
    if os.path.exists(path_or_repo):
        yield
        return
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    if not before and not is_reachable(constants.ENDPOINT):
        constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
