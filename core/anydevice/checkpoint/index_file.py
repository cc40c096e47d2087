"""The index of a sharded checkpoint, and paths that must not leave their folder."""

from __future__ import annotations

import math
import ntpath
import os
from pathlib import Path
from typing import Any

from anydevice.checkpoint.strict_json import parse_json, read_bounded
from anydevice.errors import CheckpointNotFoundError, CorruptCheckpointError, UnsafeCheckpointError
from anydevice.text import list_some

__all__ = ["inside", "read_index"]


def read_index(path: str, *, must_exist: bool = True) -> dict[str, str]:
    """Read which file of the index's folder holds each tensor.

    Args:
        path: of the index, absolute.
        must_exist: whether the files it names have to be there.

    Returns:
        Tensor name to the absolute path of its file, which is in the index's folder.

    Raises:
        CheckpointNotFoundError: the index or a shard is missing.
        CorruptCheckpointError: it is not an index.
        UnsafeCheckpointError: it names a file outside of its folder.
    """
    try:
        found = parse_json(read_bounded(path), path)
    except OSError as error:
        raise CheckpointNotFoundError(f"cannot read {path}: {error.strerror}") from None
    weight_map = _weight_map(path, found)
    folder = os.path.dirname(path)
    shards: dict[str, str] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str):
            raise CorruptCheckpointError(
                f"{path} gives {shard!r:.200} as the file of {name!r:.200}"
            )
        if shard not in shards:
            shards[shard] = os.path.normpath(inside(folder, shard, f"{path} names"))
    if must_exist:
        _require_all(path, shards)
    return {name: shards[shard] for name, shard in weight_map.items()}


def _weight_map(path: str, found: dict[str, Any]) -> dict[str, Any]:
    """The mapping of tensor names to files: under a key of its own, or the index as a whole."""
    _check_total(path, found.get("metadata"))
    if "weight_map" in found:
        weight_map = found["weight_map"]
    else:
        weight_map = {k: v for k, v in found.items() if k != "metadata" or isinstance(v, str)}
        if not all(isinstance(file, str) for file in weight_map.values()):
            weight_map = None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptCheckpointError(
            f"{path} is not the index of a checkpoint: it has no weight_map, and is no mapping of "
            "tensor names to files itself"
        )
    return weight_map


def _check_total(path: str, metadata: object) -> None:
    """Make sure that the total is a number of bytes; writers differ on what is in it."""
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if total is None:
        return
    good = isinstance(total, (int, float)) and not isinstance(total, bool)
    if not good or not math.isfinite(total) or total < 0:
        raise CorruptCheckpointError(f"{path} gives {total!r:.100} as its total_size")


def _require_all(path: str, shards: dict[str, str]) -> None:
    missing = [name for name, full in shards.items() if not os.path.exists(full)]
    if missing:
        raise CheckpointNotFoundError(
            f"{len(missing)} of the {len(shards)} files that {path} names are missing: "
            f"{list_some(missing)}. Fetch them too."
        )


def inside(folder: str, name: str, who: str) -> str:
    """The path of ``name`` in ``folder``; checked to be inside it also after symbolic links.

    The Hub's cache is allowed: its snapshots are links to the ``blobs`` of the same repository.

    Args:
        folder: absolute.
        name: relative to it.
        who: begins the message, such as ``"model.index.json names"``.

    Raises:
        UnsafeCheckpointError: it is elsewhere.
    """
    parts = name.replace("\\", "/").split("/")
    if (
        not name
        or "\0" in name
        or os.path.isabs(name)
        or ntpath.splitdrive(name)[0]
        or ".." in parts
    ):
        raise UnsafeCheckpointError(f"{who} {name!r:.200}, which is outside of its folder {folder}")
    path = os.path.join(folder, name)
    if len(parts) == 1 and name != "." and not os.path.islink(path):
        return path
    real = os.path.realpath(path)
    if not any(real.startswith(root.rstrip(os.sep) + os.sep) for root in _roots(folder)):
        raise UnsafeCheckpointError(
            f"{who} {name!r:.200}, a link that leads out of its folder, to {real}. "
            "If you trust it, give that file (or its folder) itself."
        )
    return path


def _roots(folder: str) -> list[str]:
    """Where links from a folder may lead: into it, and for a Hub snapshot to its own blobs."""
    real = os.path.realpath(folder)
    for parent in Path(real).parents:
        if parent.name == "snapshots" and parent.parent.name.startswith(("models--", "datasets--")):
            # The path is not resolved further: where ``blobs`` is a link itself, it is no cache.
            return [real, str(parent.parent / "blobs")]
    return [real]
