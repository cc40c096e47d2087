"""``anydevice merge-weights``: a sharded checkpoint as safetensors."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file

from anydevice.checkpoint import open_checkpoint
from anydevice.cli.network import cache_only_when_unreachable
from anydevice.cli.text import shows_progress, size_text
from anydevice.errors import CheckpointError, OptionError
from anydevice.saving import replacing
from anydevice.text import parse_bytes

__all__ = ["merge_weights", "register"]

_METADATA: Final = ".metadata"
#: What a training loop's state calls the model.
_MODEL: Final = "model."


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "merge-weights",
        description="Read a sharded checkpoint (a folder of torch.distributed.checkpoint, as FSDP "
        "saves it, or safetensors or torch files with an index) and write its weights as "
        "safetensors. At most one file's weights are in memory.",
    )
    parser.add_argument("checkpoint_directory", metavar="FOLDER", help="the checkpoint")
    parser.add_argument("output_path", metavar="OUTPUT", help="a folder, or a .safetensors file")
    parser.add_argument(
        "--max-shard-size",
        "--max_shard_size",
        metavar="SIZE",
        help="the largest file, such as 5GB; by default one file holds all",
    )
    parser.add_argument(
        "--unsafe-serialization",
        "--unsafe_serialization",
        action="store_true",
        help="write a torch file (.bin) instead",
    )
    parser.add_argument(
        "--remove-checkpoint-dir",
        "--remove_checkpoint_dir",
        action="store_true",
        help="remove the checkpoint when all is written",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace files that are there")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    with cache_only_when_unreachable(args.checkpoint_directory):
        written = merge_weights(
            args.checkpoint_directory,
            args.output_path,
            max_shard_size=args.max_shard_size,
            safe_serialization=not args.unsafe_serialization,
            overwrite=args.overwrite,
            progress=shows_progress(),
        )
    if args.remove_checkpoint_dir:
        shutil.rmtree(args.checkpoint_directory)
    for path in written:
        print(f"{path}  {size_text(path.stat().st_size)}")
    return 0


def merge_weights(
    checkpoint_dir: str | os.PathLike[str],
    output_path: str | os.PathLike[str],
    *,
    max_shard_size: int | str | None = None,
    safe_serialization: bool = True,
    overwrite: bool = False,
    progress: bool = False,
) -> list[Path]:
    """Write the weights of a sharded checkpoint as one file, or as shards with an index.

    Args:
        checkpoint_dir: a folder of ``torch.distributed.checkpoint``, or one with safetensors or
            torch files.
        output_path: a folder, or a file where one file is written.
        max_shard_size: bytes or such as ``"5GB"``; None writes one file.
        safe_serialization: write safetensors; else torch files.
        overwrite: replace files that are there.
        progress: show a progress bar.

    Returns:
        The files written.

    Raises:
        CheckpointNotFoundError: there is no checkpoint.
        CheckpointError: it holds no weights.
        OptionError: the output is there already, or inside the checkpoint.
    """
    folder = Path(checkpoint_dir)
    names, read = _open(folder)
    if not names:
        raise CheckpointError(f"{folder} holds no weights")
    limit = None if max_shard_size is None else parse_bytes(max_shard_size)
    shards = _divide(names, limit)
    target, files = _files(Path(output_path), len(shards), safe_serialization)
    index = target / f"{_stem(safe_serialization)}.index.json"
    for path in [*files, *([index] if len(files) > 1 else [])]:
        if path.exists() and not overwrite:
            raise OptionError(f"{path} is there already; choose another output, or --overwrite")
    target.mkdir(parents=True, exist_ok=True)
    with _bar(len(shards), progress) as advance:
        for path, shard in zip(files, shards, strict=True):
            _write(path, read(shard), safe_serialization)
            advance()
    if len(files) > 1:
        total = sum(names.values())
        places = {n: p.name for p, shard in zip(files, shards, strict=True) for n in shard}
        content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        index.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        return [*files, index]
    return files


Reader = Callable[[list[str]], dict[str, torch.Tensor]]


def _open(folder: Path) -> tuple[dict[str, int], Reader]:
    """Names of the weights with their bytes, and what reads some of them."""
    nested = [p for p in sorted(folder.glob("*")) if (p / _METADATA).is_file()]
    if (folder / _METADATA).is_file():
        return _open_distributed(folder)
    if len(nested) == 1:
        return _open_distributed(nested[0])
    if len(nested) > 1:
        raise CheckpointError(
            f"{folder} holds several checkpoints ({', '.join(p.name for p in nested)}): name one"
        )
    checkpoint = open_checkpoint(folder)

    def read(names: list[str]) -> dict[str, torch.Tensor]:
        return {name: checkpoint.tensor(name) for name in names}

    return {name: checkpoint[name].nbytes for name in checkpoint}, read


def _open_distributed(folder: Path) -> tuple[dict[str, int], Reader]:
    """A folder of ``torch.distributed.checkpoint``, read in this process alone."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    try:
        entries: Mapping[str, Any] = FileSystemReader(folder).read_metadata().state_dict_metadata
    except Exception as error:
        raise CheckpointError(
            f"{folder / _METADATA} cannot be read: {type(error).__name__}: {error}"
        ) from error
    tensors = {k: v for k, v in entries.items() if isinstance(v, TensorStorageMetadata)}
    prefix = _MODEL if any(key.startswith(_MODEL) for key in tensors) else ""
    keys = {key[len(prefix) :]: key for key in tensors if key.startswith(prefix)}

    def read(names: list[str]) -> dict[str, torch.Tensor]:
        state = {
            keys[n]: torch.empty(tensors[keys[n]].size, dtype=tensors[keys[n]].properties.dtype)
            for n in names
        }
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that it reads in this process alone
                load(state, storage_reader=FileSystemReader(folder), no_dist=True)
        except Exception as error:
            raise CheckpointError(f"{folder} cannot be read: {error}") from error
        return {n: state[keys[n]] for n in names}

    sizes = {
        name: tensors[key].size.numel() * tensors[key].properties.dtype.itemsize
        for name, key in keys.items()
    }
    return sizes, read


def _divide(names: Mapping[str, int], limit: int | None) -> list[list[str]]:
    """Names in order, in groups of at most ``limit`` bytes."""
    shards: list[list[str]] = [[]]
    used = 0
    for name, size in names.items():
        if limit is not None and used + size > limit and shards[-1]:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    return shards


def _stem(safe: bool) -> str:
    return "model.safetensors" if safe else "pytorch_model.bin"


def _files(output: Path, count: int, safe: bool) -> tuple[Path, list[Path]]:
    """The folder and the files to write."""
    stem, dot, suffix = _stem(safe).partition(".")
    if output.suffix == f".{suffix}" and not output.is_dir():
        if count > 1:
            raise OptionError(f"{output}: {count} files are needed; name a folder")
        return output.parent, [output]
    if count == 1:
        return output, [output / _stem(safe)]
    return output, [
        output / f"{stem}-{i:05}-of-{count:05}{dot}{suffix}" for i in range(1, count + 1)
    ]


def _write(path: Path, tensors: dict[str, torch.Tensor], safe: bool) -> None:
    """Write next to the place and rename, so that a file with that name is whole."""
    with replacing(path) as partial:
        if safe:
            save_file(_unshared(tensors), partial, metadata={"format": "pt"})
        else:
            torch.save(tensors, partial)


def _unshared(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Contiguous tensors, each with memory of its own: tied weights are written twice."""
    seen: set[int] = set()
    own = {}
    for name, tensor in tensors.items():
        whole = tensor.contiguous()
        pointer = whole.untyped_storage().data_ptr()
        own[name] = whole.clone() if pointer in seen else whole
        seen.add(pointer)
    return own


@contextlib.contextmanager
def _bar(count: int, shown: bool) -> Iterator[Callable[[], Any]]:
    if not shown:
        yield lambda: None
        return
    from tqdm.auto import tqdm

    with tqdm(total=count, desc="Writing", unit="file", leave=False) as bar:
        yield bar.update
