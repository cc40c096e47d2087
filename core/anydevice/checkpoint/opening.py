"""Opening a checkpoint: a file, a folder, a state dict, or a repository on the hub."""

from __future__ import annotations

import os
import re
from pathlib import Path

from anydevice.checkpoint.checkpoint import Checkpoint, FileCheckpoint
from anydevice.checkpoint.find import find_local
from anydevice.checkpoint.hub import download, is_repo_id
from anydevice.errors import CheckpointNotFoundError, OptionError
from anydevice.interrupts import uninterrupted
from anydevice.text import require_text

__all__ = ["fetch_checkpoint", "open_checkpoint"]


def open_checkpoint(
    checkpoint: str | os.PathLike[str],
    *,
    revision: str | None = None,
    variant: str | None = None,
    token: str | bool | None = None,
    subfolder: str | None = None,
) -> Checkpoint:
    """Find a checkpoint and read what it holds; no tensor is read.

    Args:
        checkpoint: a ``.safetensors`` file; a file of ``torch.save``; the ``.json`` index of a
            sharded checkpoint; a folder with one of these; or the name of a repository on the Hub.
            A path that exists on this machine is never looked up on the Hub.
        revision: branch, tag or commit of a Hub repository.
        variant: such as ``"fp16"``: takes the files that carry it in their names.
        token: for a private Hub repository; like ``revision``, ignored for local files.
        subfolder: of the folder or repository, where its weights are.

    Raises:
        CheckpointNotFoundError: there is none.
        CorruptCheckpointError: a file contradicts itself; the message names it.
        UnsafeCheckpointError: reading it would leave its folder, or run code.
        OptionError: an argument is not a string or path.

    Example:
        >>> import torch
        >>> from safetensors.torch import save_file
        >>> from anydevice.checkpoint import open_checkpoint
        >>> save_file({"x": torch.ones(2, 3)}, "model.safetensors")
        >>> open_checkpoint("model.safetensors")["x"].shape
        (2, 3)
    """
    require_text(revision=revision, variant=variant, subfolder=subfolder)
    text, path = _find(checkpoint, subfolder)
    if path is not None:
        if variant and not os.path.isdir(path):
            _require_variant(path, variant)
        return uninterrupted(lambda: FileCheckpoint(find_local(path, variant)))
    folder = download(text, revision=revision, variant=variant, token=token, subfolder=subfolder)
    return uninterrupted(lambda: FileCheckpoint(find_local(str(folder), variant)))


def _find(checkpoint: str | os.PathLike[str], subfolder: str | None) -> tuple[str, str | None]:
    """The path or name as text; and its subfolder's path, or None for the name of a repository."""
    try:
        text = os.fsdecode(checkpoint)
    except TypeError:
        raise OptionError(f"checkpoint={checkpoint!r}: a path is needed, or a name") from None
    if not _exists(text):
        if is_repo_id(text):
            return text, None
        raise CheckpointNotFoundError(
            f"no checkpoint at {text!r}: no such file or folder, and not the name of a repository"
        )
    path = os.path.join(text, subfolder) if subfolder else text
    if not _exists(path):
        raise CheckpointNotFoundError(f"{text} has no subfolder {subfolder!r}")
    return text, path


def _exists(path: str) -> bool:
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    except OSError as error:
        raise CheckpointNotFoundError(f"cannot open {path}: {error.strerror}") from None
    return True


def _require_variant(path: str, variant: str) -> None:
    """Refuse a file or index whose name carries another variant than was asked for, or none."""
    name = os.path.basename(path)
    if re.search(rf"\.{re.escape(variant)}[.-]", name) is None:
        raise CheckpointNotFoundError(
            f"{path} is not of variant={variant!r}, which its name does not carry: leave variant "
            "out, or give the folder that holds the file of that variant"
        )


def fetch_checkpoint(
    path_or_repo: str | os.PathLike[str],
    *,
    revision: str | None = None,
    variant: str | None = None,
    token: str | bool | None = None,
    subfolder: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
) -> Path:
    """Find the folder of a checkpoint with its config files; a Hub repository is downloaded.

    Args:
        path_or_repo: see `open_checkpoint`; a path that exists is returned as it is.
        revision: branch, tag or commit of a Hub repository.
        variant: such as ``"fp16"``.
        token: for a private Hub repository.
        subfolder: of the folder or repository, where the checkpoint is.
        cache_dir: the folder of the Hub's cache; by default huggingface_hub's.
        local_files_only: take what the cache has, without asking the Hub.

    Raises:
        CheckpointNotFoundError: there is none.

    Example:
        >>> from anydevice.checkpoint import fetch_checkpoint
        >>> fetch_checkpoint(".")
        PosixPath('.')
    """
    text, path = _find(path_or_repo, subfolder)
    if path is not None:
        return Path(path)
    return download(
        text,
        revision=revision,
        variant=variant,
        token=token,
        subfolder=subfolder,
        beside=("*.json", "*.py"),
        cache_dir=cache_dir,
        local_files_only=local_files_only,
    )
