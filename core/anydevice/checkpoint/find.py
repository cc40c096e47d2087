"""Which files make up a checkpoint: a file, an index, a folder."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Collection
from typing import Final, NamedTuple

from anydevice.checkpoint.index_file import inside, read_index
from anydevice.errors import CheckpointNotFoundError
from anydevice.text import list_some

__all__ = ["Choice", "Found", "choose", "find_local"]

_SAFETENSORS: Final = (".safetensors",)
_TORCH: Final = (".bin", ".pt", ".pth", ".ckpt")
#: Files that trainers save next to the weights.
_NOT_WEIGHTS: Final = re.compile(
    r"(optimizer|scheduler|scaler|rng_state|training_args|trainer_state)"
)
#: Names that mean "the weights" when other files are there too. Behind a dot: the variant.
_CANONICAL: Final = ("model", "diffusion_pytorch_model", "pytorch_model", "adapter_model")
#: How many of a folder's files a message lists.
_SHOWN: Final = 8
_SHARD: Final = re.compile(r"-(\d{2,})-of-(\d{2,})(?=\.|$)")
_INDEX: Final = re.compile(r"(.+)\.index(\..+)?\.json")


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
            See `choose`.

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
    """What is in a folder; the names of folders end with a slash, and so are no file's."""
    try:
        return sorted(e.name + "/" if e.is_dir() else e.name for e in os.scandir(folder))
    except OSError as error:
        raise CheckpointNotFoundError(f"cannot list {folder}: {error.strerror}") from None


def choose(names: Collection[str], variant: str | None, where: str) -> Choice:
    """Choose the weights among a folder's files: safetensors first, then torch's.

    Of one format, in this order: a single file with a usual name, an index, shards that are
    complete without one, the only file there is.

    Args:
        names: of the folder's files.
        variant: only files of this variant. None: only those of none; where there are no such
            weights, those of the only variant there is.
        where: names the folder in messages.

    Raises:
        CheckpointNotFoundError: there are no weights, or several that could be meant.
    """
    files = [file for name in names if (file := _WeightFile.of(name)) is not None]
    of_variant = [file for file in files if file.is_of(variant)]
    variants = {file.variant for file in files}
    if not of_variant and variant is None and len(variants) == 1:
        variant, of_variant = variants.pop(), files
    for extensions in (_SAFETENSORS, _TORCH):
        choice = _choose([f for f in of_variant if f.extension in ("", *extensions)], variant)
        if choice is not None:
            return choice
    named = f" of variant {variant!r}" if variant else ""
    ambiguous = of_variant or (files if variant is None else [])
    missing = _missing_shards(ambiguous)
    if missing:
        raise CheckpointNotFoundError(
            f"{where} lacks shards of its weights{named}: {list_some(missing, _SHOWN)}. Fetch them "
            "too."
        )
    if ambiguous:
        raise CheckpointNotFoundError(
            f"{where} has several files of weights{named}: "
            f"{list_some([file.name for file in ambiguous], _SHOWN)}. "
            "Name the file or index itself, or its variant."
        )
    raise CheckpointNotFoundError(
        f"no weights{named} in {where}: no safetensors or torch file and no index. "
        f"It has {list_some(list(names), _SHOWN, empty='no file')}."
    )


class _WeightFile(NamedTuple):
    """What the name of a file of weights, or of an index, says.

    Attributes:
        name: the file's.
        stem: without extensions and number, with the variant, such as ``"model.fp16"``.
        extension: ``".safetensors"``; empty for an index that does not say.
        is_index: whether it is an index.
        shard: its number and how many there are, for one of several.
    """

    name: str
    stem: str
    extension: str
    is_index: bool
    shard: tuple[int, int] | None

    @classmethod
    def of(cls, name: str) -> _WeightFile | None:
        """Read a name; None: it is no file of weights.

        ``model.safetensors.index.fp16.json``, ``model.fp16.safetensors.index.json``,
        ``model.fp16-00001-of-00002.safetensors`` and ``model-00001-of-00002.fp16.safetensors`` are
        all of the variant fp16.
        """
        index = _INDEX.fullmatch(name)
        body = index[1] if index else name
        extension = next((e for e in (*_SAFETENSORS, *_TORCH) if body.endswith(e)), "")
        if _NOT_WEIGHTS.match(name) or not (index or extension):
            return None
        stem = body.removesuffix(extension) + ((index[2] or "") if index else "")
        shard = _SHARD.search(stem)
        if shard is None:
            return cls(name, stem, extension, index is not None, None)
        numbers = int(shard[1]), int(shard[2])
        return cls(name, stem.replace(shard[0], "", 1), extension, index is not None, numbers)

    @property
    def variant(self) -> str | None:
        """The variant, which only usual names tell for sure: ``v1.5`` has none."""
        base, _, variant = self.stem.partition(".")
        return variant if variant and base in _CANONICAL else None

    def is_of(self, variant: str | None) -> bool:
        """Whether it is of this variant; None: of none."""
        return self.variant is None if variant is None else self.stem.endswith(f".{variant}")


def _choose(files: list[_WeightFile], variant: str | None) -> Choice | None:
    """Choose among files of one format and variant; None: it is not clear which is meant."""
    singles = [file for file in files if not file.is_index and file.shard is None]
    single = _usual(singles, variant)
    if single is not None:
        return Choice(None, [single.name])
    indexes = [file for file in files if file.is_index]
    index = _usual(indexes, variant) or (indexes[0] if len(indexes) == 1 else None)
    if index is not None:
        return Choice(index.name, [])
    if indexes:
        return None
    groups = _complete_groups(files)
    if len(groups) == 1:
        return Choice(None, groups[0])
    return Choice(None, [singles[0].name]) if len(singles) == 1 else None


def _usual(files: list[_WeightFile], variant: str | None) -> _WeightFile | None:
    """The file with the first of the usual names."""
    by_stem = {file.stem: file for file in files}
    end = f".{variant}" if variant else ""
    return next((by_stem[s + end] for s in _CANONICAL if s + end in by_stem), None)


def _complete_groups(files: list[_WeightFile]) -> list[list[str]]:
    return [
        [found[number] for number in sorted(found)]
        for count, found in _shard_groups(files)
        if len(found) == count
    ]


def _missing_shards(files: list[_WeightFile]) -> list[str]:
    """Names of shards that are not there, while others of their checkpoint are."""
    missing: list[str] = []
    for count, found in _shard_groups(files):
        name = next(iter(found.values()))
        absent = (n for n in range(1, count + 1) if n not in found)
        match = _SHARD.search(name)
        assert match is not None
        start, stop = match.span(1)
        missing += [
            f"{name[:start]}{number:0{stop - start}d}{name[stop:]}"
            for number in itertools.islice(absent, _SHOWN + 1)
        ]
    return missing


def _shard_groups(files: list[_WeightFile]) -> list[tuple[int, dict[int, str]]]:
    """How many shards each sharded checkpoint has, and those that are there by number."""
    groups: dict[tuple[str, str, int], dict[int, str]] = {}
    for file in files:
        if file.shard is not None and not file.is_index:
            number, count = file.shard
            groups.setdefault((file.stem, file.extension, count), {})[number] = file.name
    return [(count, found) for (_, _, count), found in groups.items()]
