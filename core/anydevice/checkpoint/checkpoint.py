"""Opening a checkpoint: what it holds, and its tensors on the host, mapped where they can be."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from anydevice.checkpoint.collector import collector_paused
from anydevice.checkpoint.find import Found
from anydevice.checkpoint.info import TensorInfo, form_of
from anydevice.checkpoint.mapped import MappedFile, backing_of, map_file
from anydevice.checkpoint.safetensors_file import (
    looks_like_safetensors,
    read_header,
    what_text_it_is,
)
from anydevice.checkpoint.torch_file import looks_like_torch, read_torch_file, state_dict_of
from anydevice.errors import CorruptCheckpointError

__all__ = ["Checkpoint", "FileCheckpoint"]


class Checkpoint(Mapping[str, TensorInfo]):
    """The tensors of a checkpoint by name, none of them read yet. Made by `open_checkpoint`.

    A class that presents a checkpoint differently (with other names, for example) derives from this
    one and overrides ``__getitem__``, ``__iter__``, ``__len__`` and `tensor`.

    Attributes:
        source: what to call it in messages.
        extras: entries that are not tensors, as torch files can have them.
        may_share: whether tensors of two names may share memory, as in torch files.

    Example:
        >>> import torch
        >>> from safetensors.torch import save_file
        >>> from anydevice.checkpoint import open_checkpoint
        >>> save_file({"x": torch.ones(2)}, "model.safetensors")
        >>> checkpoint = open_checkpoint("model.safetensors")
        >>> list(checkpoint), checkpoint.tensor("x")
        (['x'], tensor([1., 1.]))
    """

    source: str = "the checkpoint"
    extras: Mapping[str, Any] = {}
    may_share: bool = True

    def __getitem__(self, name: str) -> TensorInfo:
        raise NotImplementedError

    def __iter__(self) -> Iterator[str]:
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor on the host, in the file's dtype: a view of the file where it can be.

        Raises:
            KeyError: there is none of that name.
        """
        raise NotImplementedError

    def reopened(self) -> Checkpoint:
        """The same checkpoint, whose views share no memory with those that were given before.

        Views of one mapping see each other's writes; two models must not.
        """
        return self

    def check(self) -> None:
        """Make sure that the files are those that were opened.

        Raises:
            CheckpointNotFoundError: one is gone.
            CorruptCheckpointError: one has changed.
        """

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.nbytes for info in self.values())


class FileCheckpoint(Checkpoint):
    """A checkpoint in files of safetensors or torch."""

    def __init__(self, found: Found) -> None:
        self.source = found.source
        self.extras = {}
        self.may_share = False
        self._is_reopened = False
        self._infos: dict[str, TensorInfo] = {}
        self._files: dict[str, MappedFile] = {}
        self._loaded: dict[str, torch.Tensor] = {}  # not stored as plain bytes
        with collector_paused():
            contents = {file: self._open(file) for file in found.files}
            for name, file in _assign(found, contents):
                self._infos[name] = contents[file][name]

    def __getitem__(self, name: str) -> TensorInfo:
        return self._infos[name]

    def __contains__(self, name: object) -> bool:
        return name in self._infos

    def __iter__(self) -> Iterator[str]:
        return iter(self._infos)

    def __len__(self) -> int:
        return len(self._infos)

    def __repr__(self) -> str:
        return f"<Checkpoint {self.source!r}: {len(self)} tensors in {len(self._files)} files>"

    def tensor(self, name: str) -> torch.Tensor:
        """See `Checkpoint.tensor`."""
        dtype, shape, _, file, offset, _ = self._infos[name]
        if offset is None:
            loaded = self._loaded[name]
            return loaded.clone() if self._is_reopened else loaded
        return self._files[file].tensor(offset, dtype, shape)

    def reopened(self) -> Checkpoint:
        """See `Checkpoint.reopened`."""
        other = copy.copy(self)
        other._is_reopened = True
        other._files = {path: map_file(path, own=True) for path in self._files}
        self.check()  # after: a file that is replaced in between is noticed
        return other

    def check(self) -> None:
        """See `Checkpoint.check`."""
        for file in self._files.values():
            file.check()

    def _open(self, path: str) -> dict[str, TensorInfo]:
        file = self._files[path] = map_file(path, own=True)
        if file.nbytes == 0:
            raise CorruptCheckpointError(f"{path} is empty. Fetch it again, or save it again.")
        start = file.read(0, 100)
        # The name decides first: the error for a damaged safetensors file should say so.
        if path.endswith(".safetensors") or (
            looks_like_safetensors(start) and not looks_like_torch(start)
        ):
            return read_header(file)
        if not looks_like_torch(start):
            other = what_text_it_is(start)
            raise CorruptCheckpointError(
                f"{path} is {other}"
                if other
                else f"{path} is neither a safetensors file nor one of torch.save: it begins with "
                f"{start[:8]!r}. Fetch it again, or save it again."
            )
        self.may_share = True
        return self._take_torch(path, state_dict_of(read_torch_file(path), path))

    def _take_torch(self, path: str, state: dict[str, Any]) -> dict[str, TensorInfo]:
        infos = {}
        extras = dict(self.extras)
        for name, value in state.items():
            if not isinstance(value, torch.Tensor):
                extras[name] = value
                continue
            place = backing_of(value)
            offset = None if place is None else place.offset
            if offset is None:
                self._loaded[name] = value.detach()
            infos[name] = TensorInfo.describe(
                value.dtype, value.shape, path, offset, form_of(value)
            )
        self.extras = extras
        return infos


def _assign(
    found: Found, contents: Mapping[str, Mapping[str, TensorInfo]]
) -> Iterable[tuple[str, str]]:
    """Which file each tensor is taken from: the index's, else the only one that has it."""
    weight_map = found.weight_map or {}
    owner = dict(weight_map)
    for file, infos in contents.items():
        for name in infos:
            if owner.setdefault(name, file) != file and name not in weight_map:
                raise CorruptCheckpointError(
                    f"tensor {name!r:.200} is in {owner[name]} and in {file}, and no index says "
                    "which of them counts. Remove one of the files."
                )
    absent = [name for name, file in weight_map.items() if name not in contents[file]]
    if absent:
        raise CorruptCheckpointError(
            f"the index of {found.source} says that {weight_map[absent[0]]} has "
            f"{absent[0]!r:.200}, but it does not ({len(absent)} tensors are not where the index "
            "says). Index and shards are from different checkpoints: fetch them again."
        )
    return owner.items()
