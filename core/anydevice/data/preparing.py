"""From a user's loader to a prepared one, and to one that leaves its first batches out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from anydevice.data.dispatching import DataLoaderDispatcher
from anydevice.data.iterable import IterableDatasetShard, NotingCollate
from anydevice.data.loaders import DataLoaderShard, PreparedLoader, become
from anydevice.data.progress import Progress
from anydevice.data.samplers import BatchSamplerShard, own_generator, sampler_seed
from anydevice.errors import MissingDependencyError, OptionError
from anydevice.randomness import synchronize_rng_states

__all__ = ["prepare_data_loader", "share_of_data", "skip_first_batches"]


def prepare_data_loader(
    dataloader: DataLoader[Any],
    device: torch.device | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: list[Any] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: Callable[..., Any] | None = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: Any = None,
) -> Any:
    """Make a loader give this process its part of the data, on its device.

    All processes call this, with equal loaders. The result is a copy, of the same class: the
    user's loader stays as it is.

    Args:
        dataloader: any `torch.utils.data.DataLoader`, its samplers and collate function included.
        device: where batches are put, with ``put_on_device``.
        num_processes: among how many processes; None means those of the group, or one.
        process_index: which of them this one is; None means its rank.
        split_batches: each batch is cut among the processes; else each gets whole ones in turn.
        put_on_device: put batches on ``device``.
        rng_types: kinds of random state made equal on all processes before each epoch.
        dispatch_batches: only the main process reads, and sends each of the others its batch.
        even_batches: repeat samples from the beginning until all get equally many batches.
        slice_fn_for_dispatch: with ``dispatch_batches``, cuts a round's batch: it is called with
            the batch, a slice, ``process_index`` and ``num_processes``.
        use_seedable_sampler: accepted; shuffling is always a function of seed and epoch.
        data_seed: the seed of shuffling; None takes that of the sampler's or loader's generator,
            else torch's initial seed on the main process.
        non_blocking: do not wait for copies to the device.
        use_stateful_dataloader: the loader becomes torchdata's `StatefulDataLoader`.
        torch_device_mesh: processes that differ in the dimension "tp", "cp" or "pp" only get the
            same data.

    Raises:
        OptionError: an option that this loader cannot have; a batch that cannot be split.
        MissingDependencyError: ``use_stateful_dataloader`` without torchdata.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> from anydevice import prepare_data_loader
        >>> data = DataLoader(range(5), batch_size=2)
        >>> [b.tolist() for b in prepare_data_loader(data, num_processes=2, process_index=1)]
        [[2, 3], [1, 2]]
    """
    count, index = share_of_data(num_processes, process_index, torch_device_mesh)
    _check(dataloader, count, bool(dispatch_batches), slice_fn_for_dispatch)
    if use_stateful_dataloader:
        dataloader = _stateful(dataloader)
    kind: type[PreparedLoader] = DataLoaderDispatcher if dispatch_batches else DataLoaderShard
    made: PreparedLoader = become(dataloader, kind)
    made.device = device if put_on_device else None
    made.non_blocking = non_blocking
    made.num_processes, made.process_index = count, index
    made.split_batches = split_batches
    made.even_batches = even_batches
    if rng_types:
        made.synchronize = partial(_synchronize, list(rng_types))
    seed = _seed(dataloader, data_seed, count if num_processes is None else 1)
    exact = dataloader.batch_sampler is None or type(dataloader.batch_sampler) is BatchSampler
    made.progress = Progress(seed, dataloader.batch_size if exact else None)
    if isinstance(made, DataLoaderDispatcher):
        made.slice_fn = slice_fn_for_dispatch
        count, index = 1, 0  # its loader is the whole one
    if isinstance(dataloader.dataset, IterableDataset):
        _shard_stream(made, count, index)
    else:
        _shard_indices(made, count, index)
    return made


def skip_first_batches(dataloader: DataLoader[Any], num_batches: int = 0) -> Any:
    """A loader without its first batches: their indices are skipped, their samples not read.

    Of an iterable data set the samples are read and dropped. A prepared loader and the result
    share their epoch: the one goes on where the other ended.

    Args:
        dataloader: a prepared loader, or any other.
        num_batches: batches of this process to leave out.

    Raises:
        OptionError: a negative number.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> from anydevice import skip_first_batches
        >>> [b.tolist() for b in skip_first_batches(DataLoader(range(6), batch_size=2), 2)]
        [[4, 5]]
    """
    if num_batches < 0:
        raise OptionError(f"num_batches counts batches to skip: {num_batches} is negative")
    if not isinstance(dataloader, PreparedLoader):
        dataloader = prepare_data_loader(dataloader, num_processes=1, process_index=0)
    kind: Any = type(dataloader)
    made = become(dataloader, kind)
    made.skip_batches = num_batches
    return made


def share_of_data(
    count: int | None = None, index: int | None = None, mesh: Any = None
) -> tuple[int, int]:
    """Among how many a loader's data is divided, and which of them this process is.

    Args:
        count: how many processes there are; None: as the process group says.
        index: which of them this is; None: as above.
        mesh: a `DeviceMesh` of them. Those that work on one batch together count as one.
    """
    alone = not (dist.is_available() and dist.is_initialized())
    if count is None:
        count = 1 if alone else dist.get_world_size()
    if index is None:
        index = 0 if alone else dist.get_rank()
    if mesh is not None:
        same = 1  # processes that work on one batch together
        for name in ("tp", "cp", "pp"):
            if mesh.mesh_dim_names and name in mesh.mesh_dim_names:
                same *= mesh[name].size()
        count, index = count // same, index // same
    return count, index


def _check(loader: DataLoader[Any], count: int, dispatch: bool, slice_fn: Any) -> None:
    if not isinstance(loader, DataLoader):
        raise OptionError(f"not a torch DataLoader, but a {type(loader).__name__}")
    if isinstance(loader, PreparedLoader):
        raise OptionError("this loader is prepared already")
    if slice_fn is not None and not dispatch:
        raise OptionError("slice_fn_for_dispatch needs dispatch_batches=True")
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    if count > 1 and isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
        raise OptionError(
            "the loader's DistributedSampler divides the data already, and prepare would divide "
            "it again. Give the loader shuffle=True, or the sampler beneath; or do not prepare it"
        )
    if count > 1 and not getattr(loader, "in_order", True):
        raise OptionError(
            "in_order=False does not go with several processes: which of a batch's samples are "
            "repeated ones could not be known. Use in_order=True"
        )


def _seed(loader: DataLoader[Any], data_seed: int | None, count: int) -> int:
    """The seed of this loader's order: the main process's, on all."""
    seed = data_seed
    if seed is None:
        sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
        seed = sampler_seed(sampler)
    if seed is None and isinstance(loader.generator, torch.Generator):
        seed = loader.generator.initial_seed()
    if seed is None:
        seed = torch.initial_seed()
    seed %= 1 << 63
    if count > 1:
        box = [seed]
        dist.broadcast_object_list(box, src=0)
        seed = box[0]
    return seed


def _shard_indices(made: PreparedLoader, count: int, index: int) -> None:
    """Put a shard in place of the loader's sampler."""
    state = made.__dict__
    seed = made.progress.seed
    sampler = made.batch_sampler
    items = sampler is None
    if items:
        sampler = own_generator(made.sampler, seed)
    elif type(sampler) is BatchSampler:
        inner = own_generator(sampler.sampler, seed)
        sampler = BatchSampler(inner, sampler.batch_size, sampler.drop_last)
        state["sampler"] = inner
    shard = BatchSamplerShard(
        sampler,
        count,
        index,
        made.split_batches and not items and count > 1,
        made.even_batches,
        items=items,
        seed=seed,
    )
    state["sampler" if items else "batch_sampler"] = shard


def _shard_stream(made: PreparedLoader, count: int, index: int) -> None:
    """Put a shard in place of the loader's iterable data set."""
    if count == 1 or _is_split(made.dataset, count, index):
        return
    state = made.__dict__
    shard = IterableDatasetShard(
        made.dataset,
        made.batch_size,
        made.drop_last,
        count,
        index,
        made.split_batches,
        made.even_batches,
    )
    share = shard.division.share
    if made.batch_size is not None and share != made.batch_size:
        state["batch_size"] = share
        state["batch_sampler"] = BatchSampler(made.sampler, share or 1, made.drop_last)
    state["dataset"] = shard
    state["collate_fn"] = NotingCollate(made.collate_fn)


def _is_split(dataset: Any, count: int, index: int) -> bool:
    """Whether the user has divided the stream already: ``datasets``' `split_dataset_by_node`."""
    own = getattr(dataset, "_distributed", None)
    if own is None or getattr(own, "world_size", 1) == 1:
        return False
    if (own.world_size, own.rank) != (count, index):
        raise OptionError(
            f"the data set was split for rank {own.rank} of {own.world_size}, but this is process "
            f"{index} of {count}. Split it for these, or not at all: prepare divides it"
        )
    return True


def _stateful(loader: DataLoader[Any]) -> Any:
    """The same loader as torchdata's."""
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader
    except ImportError as error:
        raise MissingDependencyError(
            "use_stateful_dataloader=True needs torchdata 0.8 or later: pip install torchdata"
        ) from error
    if isinstance(loader, StatefulDataLoader):
        return loader
    settings = {
        name: getattr(loader, name)
        for name in (
            "num_workers",
            "collate_fn",
            "pin_memory",
            "timeout",
            "worker_init_fn",
            "multiprocessing_context",
            "generator",
            "prefetch_factor",
            "persistent_workers",
        )
    }
    if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
        settings |= {"batch_size": loader.batch_size}
        settings |= {"drop_last": loader.drop_last} if loader.batch_size is not None else {}
        if not isinstance(loader.dataset, IterableDataset):
            settings["sampler"] = loader.sampler
        return StatefulDataLoader(loader.dataset, **settings)
    made = StatefulDataLoader(loader.dataset, batch_sampler=loader.batch_sampler, **settings)
    for name in ("batch_size", "sampler", "drop_last"):
        made.__dict__[name] = getattr(loader, name)
    return made


def _synchronize(kinds: list[Any]) -> None:
    """Make random states those of the main process, on all; samples' order needs no such thing."""
    names = [str(getattr(kind, "value", kind)) for kind in kinds]
    synchronize_rng_states([name for name in names if name != "generator"])
