"""Checkpoints of the Hub, through huggingface_hub: its cache, its offline mode, its tokens."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from anydevice.checkpoint.find import choose
from anydevice.checkpoint.index_file import read_index
from anydevice.errors import CheckpointNotFoundError

__all__ = ["download", "is_repo_id"]

#: ``name`` or ``owner/name``, as huggingface_hub allows them.
_REPO_ID: Final = re.compile(
    r"(?!.*(?:--|\.\.))[A-Za-z0-9][\w.-]{0,95}(?:/[A-Za-z0-9][\w.-]{0,95})?"
)
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")


def is_repo_id(text: str) -> bool:
    """Whether a text can be the name of a repository, and is no mistyped path to a file."""
    return _REPO_ID.fullmatch(text) is not None and not text.endswith((".safetensors", ".json"))


def download(
    repo_id: str,
    *,
    revision: str | None = None,
    variant: str | None = None,
    token: str | bool | None = None,
    subfolder: str | None = None,
    beside: Sequence[str] = (),
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
) -> Path:
    """Download a repository's weights, or find them in the cache.

    Only the files that are needed are fetched: safetensors where the repository has them, and of
    one variant.

    Args:
        repo_id: such as ``"owner/name"``.
        revision: branch, tag or commit.
        variant: such as ``"fp16"``.
        token: for a private repository; None uses the one that is stored.
        subfolder: of the repository, where its weights are.
        beside: patterns of other files to fetch, such as ``"*.json"``.
        cache_dir: the folder of the cache; by default huggingface_hub's.
        local_files_only: take what the cache has, without asking the Hub.

    Returns:
        The folder with the weights.

    Raises:
        CheckpointNotFoundError: there is no such repository or revision, it has no weights, or it
            is not in the cache and cannot be reached.
    """
    fetch = _Fetcher(repo_id, revision, token, cache_dir)
    names = None if local_files_only else fetch.names()
    prefix = f"{subfolder.strip('/')}/" if subfolder else ""
    if names is None:  # offline: what the cache has must do
        folder = fetch.snapshot(None)
        return folder / prefix if prefix else folder
    here = [n[len(prefix) :] for n in names if n.startswith(prefix) and "/" not in n[len(prefix) :]]
    choice = choose(
        here, variant, f"the repository {repo_id}{f'/{subfolder}' if subfolder else ''}"
    )
    wanted = [glob.escape(prefix + name) for name in [choice.index_name, *choice.files] if name]
    folder = fetch.snapshot([*wanted, *beside])
    if choice.index_name is not None:
        index = str(folder / prefix / choice.index_name)
        shards = _shards(index)
        fetch.revision = folder.name if _COMMIT.fullmatch(folder.name) else revision
        fetch.snapshot([glob.escape(prefix + shard) for shard in shards])
    return folder / prefix if prefix else folder


def _shards(index: str) -> list[str]:
    """The names in an index whose files may not be here yet."""
    folder = os.path.dirname(index)
    paths = dict.fromkeys(read_index(index, must_exist=False).values())
    return [os.path.relpath(path, folder).replace(os.sep, "/") for path in paths]


class _Fetcher:
    """Calls to huggingface_hub about one repository, and its errors in our words."""

    def __init__(
        self,
        repo_id: str,
        revision: str | None,
        token: str | bool | None,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        self.repo_id = repo_id
        self.revision = revision
        self.token = token
        self.where = {} if cache_dir is None else {"cache_dir": cache_dir}

    def names(self) -> list[str] | None:
        """All files of the repository; None when it cannot be asked."""
        import huggingface_hub
        from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

        try:
            api = huggingface_hub.HfApi(token=self.token)
            return list(api.list_repo_files(self.repo_id, revision=self.revision))
        except HfHubHTTPError as error:
            if error.response is not None and error.response.status_code < 500:
                raise self._not_found(error) from error
            return None
        except (OfflineModeIsEnabled, OSError):
            return None
        except Exception as error:
            # Its HTTP client, and so the error of a lost connection, has changed over time.
            if type(error).__module__.startswith(("httpx", "httpcore", "requests", "urllib3")):
                return None
            raise self._not_found(error) from error

    def snapshot(self, patterns: list[str] | None) -> Path:
        """Fetch files, or find them in the cache; None: only the cache is asked."""
        import huggingface_hub

        call: Callable[..., Any] = huggingface_hub.snapshot_download
        try:
            folder = call(
                self.repo_id,
                revision=self.revision,
                token=self.token,
                allow_patterns=patterns,
                local_files_only=patterns is None,
                **self.where,
            )
        except Exception as error:
            raise self._not_found(error) from error
        return Path(folder)

    def _not_found(self, error: Exception) -> CheckpointNotFoundError:
        from huggingface_hub import constants

        at = f" at revision {self.revision!r}" if self.revision else ""
        offline = " (HF_HUB_OFFLINE is set)" if constants.HF_HUB_OFFLINE else ""
        reason = str(error)[:400].rstrip(".")
        return CheckpointNotFoundError(
            f"cannot get {self.repo_id!r}{at} from the Hub{offline}, and it is no file or folder "
            f"here: {type(error).__name__}: {reason}. Check the name and the revision; a private "
            "repository needs a token; without a network, huggingface_hub's cache must have it."
        )
