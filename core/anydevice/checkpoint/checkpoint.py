"""Opening a checkpoint: what it holds, and its tensors on the host, mapped where they can be."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from anydevice.checkpoint.collector import collector_paused
from anydevice.checkpoint.find import Found, find_local
from anydevice.checkpoint.hub import download, is_repo_id
from anydevice.checkpoint.info import TensorInfo, form_of
from anydevice.checkpoint.mapped import MappedFile, backing_of, map_file
from anydevice.checkpoint.safetensors_file import (
    looks_like_safetensors,
    read_header,
    what_text_it_is,
)
from anydevice.checkpoint.torch_file import looks_like_torch, read_torch_file, state_dict_of
from anydevice.errors import CheckpointNotFoundError, CorruptCheckpointError, OptionError
from anydevice.interrupts import uninterrupted
from anydevice.text import require_text

__all__ = ["Checkpoint", "fetch_checkpoint", "open_checkpoint"]


class Checkpoint(Mapping[str, TensorInfo]):
    """The tensors of a checkpoint by name, none of them read yet. Made by `open_checkpoint`.

    A class that presents a checkpoint differently (with other names, for example) derives from this
    one and overrides ``__getitem__``, ``__iter__``, ``__len__`` and `tensor`.

    Attributes:
        source: what to call it in messages.
        extras: entries that are not tensors, as torch files can have them.
        may_share: whether tensors of two names may share memory, as in torch files.
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


class _FileCheckpoint(Checkpoint):
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
        dtype, shape, _, file, offset, _ = self._infos[name]
        if offset is None:
            loaded = self._loaded[name]
            return loaded.clone() if self._is_reopened else loaded
        return self._files[file].tensor(offset, dtype, shape)

    def reopened(self) -> Checkpoint:
        other = copy.copy(self)
        other._is_reopened = True
        other._files = {path: map_file(path, own=True) for path in self._files}
        self.check()  # after: a file that is replaced in between is noticed
        return other

    def check(self) -> None:
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
    """
    require_text(revision=revision, variant=variant, subfolder=subfolder)
    text = _as_text(checkpoint)
    if _exists(text):
        path = os.path.join(text, subfolder) if subfolder else text
        if not _exists(path):
            raise CheckpointNotFoundError(f"{text} has no subfolder {subfolder!r}")
        if variant and not os.path.isdir(path):
            _require_variant(path, variant)
        return uninterrupted(lambda: _FileCheckpoint(find_local(path, variant)))
    _require_repo_id(text)
    folder = download(text, revision=revision, variant=variant, token=token, subfolder=subfolder)
    return uninterrupted(lambda: _FileCheckpoint(find_local(str(folder), variant)))


def _as_text(checkpoint: str | os.PathLike[str]) -> str:
    try:
        return os.fsdecode(checkpoint)
    except TypeError:
        raise OptionError(f"checkpoint={checkpoint!r}: a path is needed, or a name") from None


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
    """
    text = _as_text(path_or_repo)
    if _exists(text):
        path = Path(text, subfolder) if subfolder else Path(text)
        if not path.exists():
            raise CheckpointNotFoundError(f"{text} has no subfolder {subfolder!r}")
        return path
    _require_repo_id(text)
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


def _require_repo_id(text: str) -> None:
    if not is_repo_id(text):
        raise CheckpointNotFoundError(
            f"no checkpoint at {text!r}: no such file or folder, and not the name of a repository"
        )
