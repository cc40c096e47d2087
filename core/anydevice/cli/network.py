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

from anydevice.checkpoint.hub import is_repo_id
from anydevice.errors import CheckpointNotFoundError

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


def _is_cached(repo_id: str) -> bool:
    """Whether the cache of the Hub has a folder for a repository."""
    from huggingface_hub import constants, file_download

    name = file_download.repo_folder_name(repo_id=repo_id, repo_type="model")
    return os.path.isdir(os.path.join(constants.HF_HUB_CACHE, name))


@contextlib.contextmanager
def cache_only_when_unreachable(path_or_repo: str) -> Iterator[None]:
    """While it lasts, huggingface_hub uses only its cache, if the Hub cannot be reached.

    Raises:
        CheckpointNotFoundError: nothing has this name: no file, no folder, and no repository that
            could be fetched. It is raised before anything large is imported.
    """
    if os.path.exists(path_or_repo):
        yield
        return
    if not is_repo_id(path_or_repo):
        raise CheckpointNotFoundError(f"{path_or_repo}: no such file or folder")
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    if not before and not is_reachable(constants.ENDPOINT):
        constants.HF_HUB_OFFLINE = True
    try:
        if constants.HF_HUB_OFFLINE and not _is_cached(path_or_repo):
            reason = "HF_HUB_OFFLINE is set" if before else f"{constants.ENDPOINT} does not answer"
            raise CheckpointNotFoundError(
                f"{path_or_repo}: no file or folder here, and not in the cache of the Hub, which "
                f"cannot be asked ({reason}). Check the name."
            )
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
