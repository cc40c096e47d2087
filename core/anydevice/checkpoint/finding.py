"""Which files make up a checkpoint: a file, an index, a folder."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable
from typing import Final, NamedTuple

from anydevice.checkpoint.index_file import inside, read_index
from anydevice.errors import CheckpointNotFoundError
from anydevice.text import list_some

__all__ = ["Choice", "Found", "choose", "find_local"]

_SAFETENSORS: Final = (".safetensors",)
_TORCH: Final = (".bin", ".pt", ".pth", ".ckpt")
#: What trainers leave beside the weights.
_NOT_WEIGHTS: Final = re.compile(
    r"(optimizer|scheduler|scaler|rng_state|training_args|trainer_state)"
)
#: Names that mean "the weights" when other files are there too.
_CANONICAL: Final = ("model", "diffusion_pytorch_model", "pytorch_model", "adapter_model")
#: How many of a folder's files a message lists.
_SHOWN: Final = 8
_SHARD: Final = re.compile(r"(?P<stem>.+)-(?P<number>\d{2,})-of-(?P<count>\d{2,})(?P<rest>\..+)")


class Choice(NamedTuple):
    """File names in a folder: an index, or the files themselves."""

    index_name: str | None
    files: list[str]


class Found(NamedTuple):
    """A checkpoint's files on this machine.

    Attributes:
        source: what to call the checkpoint in messages.
        files: absolute paths, in order.
        weight_map: tensor name to its file, where an index says so.
    """

    source: str
    files: list[str]
    weight_map: dict[str, str] | None = None


def find_local(path: str, variant: str | None = None) -> Found:
    """Find a checkpoint's files from a path that exists.

    Args:
        path: a file of weights, an index (``.json``), or a folder.
        variant: such as ``"fp16"``: in a folder, take the files that carry it in their names.

    Raises:
        CheckpointNotFoundError: the folder has none, or several.
        CorruptCheckpointError, UnsafeCheckpointError: see `read_index`.
    """
    path = os.path.abspath(path)
    if not os.path.isdir(path):
        if path.endswith(".json"):
            return _indexed(path, path)
        return Found(path, [path])
    choice = choose(_names(path), variant, path)
    if choice.index_name is not None:
        return _indexed(inside(path, choice.index_name, f"{path} has"), path)
    return Found(path, [inside(path, name, f"{path} has") for name in choice.files])


def _indexed(index: str, source: str) -> Found:
    weight_map = read_index(index)
    return Found(source, list(dict.fromkeys(weight_map.values())), weight_map)


def _names(folder: str) -> list[str]:
    try:
        return sorted(e.name for e in os.scandir(folder) if not e.is_dir())
    except OSError as error:
        raise CheckpointNotFoundError(f"cannot list {folder}: {error.strerror}") from None


def choose(names: Collection[str], variant: str | None, where: str) -> Choice:
    """Choose the weights among a folder's files: safetensors first, then torch's.

    Of one format, in this order: a single file with a usual name, an index, shards that are
    complete without one, the only file there is.

    Args:
        names: of the folder's files.
        variant: only files of this variant; None prefers those without one.
        where: names the folder in messages.

    Raises:
        CheckpointNotFoundError: there are no weights, or several that could be meant.
    """
    usable = [name for name in names if not _NOT_WEIGHTS.match(name)]
    ambiguous: list[str] = []
    for extensions in (_SAFETENSORS, _TORCH):
        singles, shards, indexes = _sort(usable, extensions, variant)
        canonical = _canonical(singles)
        if canonical is not None:
            return Choice(None, [canonical])
        index = _canonical(indexes) or (indexes[0] if len(indexes) == 1 else None)
        if index is not None:
            return Choice(index, [])
        groups = _complete_groups(shards)
        if len(groups) == 1 and not indexes:
            return Choice(None, groups[0])
        if len(singles) == 1 and not indexes:
            return Choice(None, singles)
        ambiguous += indexes or singles or shards
    of_variant = f" of variant {variant!r}" if variant else ""
    if ambiguous:
        raise CheckpointNotFoundError(
            f"{where} has several files of weights{of_variant}, or incomplete shards: "
            f"{list_some(ambiguous, _SHOWN)}. Name the file or index itself, or its variant."
        )
    raise CheckpointNotFoundError(
        f"no weights{of_variant} in {where}: no safetensors or torch file and no index. "
        f"It has {list_some(list(names), _SHOWN, empty='no file')}."
    )


def _sort(
    names: Iterable[str], extensions: tuple[str, ...], variant: str | None
) -> tuple[list[str], list[str], list[str]]:
    """Single files, shards and indexes of one format and variant."""
    singles: list[str] = []
    shards: list[str] = []
    indexes: list[str] = []
    for name in names:
        if name.endswith(".json"):
            if _is_index(name, extensions, variant):
                indexes.append(name)
        elif name.endswith(extensions):
            shard = _SHARD.fullmatch(name)
            stem = (shard["stem"] + shard["rest"]) if shard else name
            if variant is None or f".{variant}." in stem or stem.split(".")[0].endswith(variant):
                (shards if shard else singles).append(name)
    return singles, shards, indexes


def _is_index(name: str, extensions: tuple[str, ...], variant: str | None) -> bool:
    """``model.safetensors.index.json``; of a variant ``model.safetensors.index.fp16.json``."""
    end = f".index.{variant}.json" if variant else ".index.json"
    alternative = f".{variant}{extensions[0]}.index.json" if variant else end
    if not name.endswith((end, alternative)):
        return False
    others = _TORCH if extensions == _SAFETENSORS else _SAFETENSORS
    return not any(f"{extension}." in name for extension in others)


def _canonical(names: list[str]) -> str | None:
    by_stem = {name.split(".")[0]: name for name in sorted(names, key=len, reverse=True)}
    return next((by_stem[stem] for stem in _CANONICAL if stem in by_stem), None)


def _complete_groups(shards: list[str]) -> list[list[str]]:
    groups: dict[tuple[str, str, str], dict[int, str]] = {}
    for name in shards:
        match = _SHARD.fullmatch(name)
        assert match is not None
        key = (match["stem"], match["count"], match["rest"])
        groups.setdefault(key, {})[int(match["number"])] = name
    return [
        [found[number] for number in sorted(found)]
        for (_, count, _), found in groups.items()
        if len(found) == int(count)
    ]
