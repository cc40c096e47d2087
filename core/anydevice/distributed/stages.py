"""Which blocks each process gets: one placement over the memory of all of them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn

from anydevice.devices import CPU, DISK, parse_device
from anydevice.distributed.chain import Chain
from anydevice.errors import DoesNotFitError, OptionError
from anydevice.placement import PlacementOptions, get_max_memory, resolve_device_map
from anydevice.processes import PartialState
from anydevice.text import format_bytes

__all__ = ["Memory", "Stage", "block_bytes", "own_memory", "plan_stages", "share_memory"]

#: The part of measured memory that is left to activations and caches.
_LEFT: Final = 0.1


@dataclasses.dataclass(frozen=True)
class Memory:
    """What one process may hold, in bytes.

    Attributes:
        device: of its accelerators; of the host where it has none.
        host: of the host next to them.
        disk: whether more may rest on the disk.
        budgets: by device, as the planner within the process takes them.
    """

    device: int
    host: int
    disk: bool
    budgets: Mapping[Any, int]


@dataclasses.dataclass(frozen=True)
class Stage:
    """The part of a model that one process holds and runs.

    Attributes:
        rank: of the process.
        start: the index of its first block.
        stop: the index after its last block.
        nbytes: of its weights and buffers; a tied weight that two stages need counts for both.
        is_first: whether it has what runs before the blocks.
        is_last: whether it has what runs after them.

    Example:
        >>> from anydevice.distributed import Stage
        >>> stage = Stage(rank=0, start=0, stop=3, nbytes=1024, is_first=True, is_last=False)
        >>> stage.stop - stage.start
        3
    """

    rank: int
    start: int
    stop: int
    nbytes: int
    is_first: bool
    is_last: bool


def own_memory(
    state: PartialState, max_memory: Mapping[Any, int | str] | None, *, offload: bool
) -> Memory:
    """The memory that this process may use.

    Args:
        state: of this process.
        max_memory: budgets of this process's devices; None measures its own device, and its share
            of the host's memory. A tenth of what is measured is left free.
        offload: whether the host next to an accelerator, and the disk, may hold weights.

    Raises:
        BudgetError, UnknownDeviceError: a budget cannot be read.
    """
    if max_memory is None:
        measured = {str(parse_device(key)): size for key, size in get_max_memory().items()}
        here = str(parse_device(state.device))
        budgets: dict[Any, int] = {here: int(measured[here] * (1 - _LEFT))}
        budgets[CPU.type] = int(measured[CPU.type] * (1 - _LEFT)) // state.local_num_processes
    else:
        budgets = dict(get_max_memory(max_memory))
    host = sum(size for key, size in budgets.items() if parse_device(key) == CPU)
    device = sum(size for key, size in budgets.items() if parse_device(key).is_accelerator)
    disk = offload and (max_memory is None or all(parse_device(key) != DISK for key in max_memory))
    if not device:
        device, host = host, 0
    elif not offload:
        host = 0
        budgets = {key: 0 if parse_device(key) == CPU else size for key, size in budgets.items()}
    return Memory(device, host, disk, budgets)


def share_memory(state: PartialState, own: Memory) -> list[Memory]:
    """What each rank may hold. Every rank must call it."""
    told = state.meet("load_pipeline: memory", payload=json.dumps(_plain(own)).encode())
    return [Memory(**json.loads(answer), budgets={}) for answer in told]


def _plain(memory: Memory) -> dict[str, Any]:
    return {"device": memory.device, "host": memory.host, "disk": memory.disk}


def block_bytes(chain: Chain) -> list[int]:
    """Bytes of each block; the first and the last with what runs before and after the chain."""
    return [
        sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        for tensors in _shares(chain)
    ]


def plan_stages(chain: Chain, memory: Sequence[Memory]) -> list[Stage]:
    """Give each rank blocks that follow one another, as evenly as the memory of all allows.

    Accelerators come first; where they are too small for the model, each rank's host counts too,
    and then the disk.

    Args:
        chain: of the model.
        memory: of each rank.

    Raises:
        OptionError: there are more ranks than blocks.
        DoesNotFitError: the memory is too small, or that of one rank for a single block.
    """
    size, count = len(memory), len(chain.blocks)
    if size > count:
        raise OptionError(
            f"{size} processes, and {chain.container or 'the model'} has {count} blocks: each "
            f"process needs one at least. Start {count} or fewer"
        )
    shares = _shares(chain)
    nbytes = block_bytes(chain)
    rooms = [[m.device for m in memory], [m.device + m.host for m in memory]]
    if all(m.disk for m in memory):
        rooms.append([sum(nbytes) + 1] * size)
    failure: DoesNotFitError | None = None
    for room in rooms:
        try:
            ranks = _place(shares, room)
        except DoesNotFitError as error:
            failure = failure or error
            continue
        return _stages(chain, _nobody_idle(chain, ranks, nbytes, room), nbytes)
    said = ", ".join(f"rank {rank}: {format_bytes(m)}" for rank, m in enumerate(rooms[-1]))
    raise DoesNotFitError(
        f"{type(chain.bare).__name__} does not fit: its stages need {format_bytes(sum(nbytes))}, "
        f"and the processes may hold {said}. Start more of them, raise max_memory, allow offload, "
        "or pass a smaller dtype"
    ) from failure


class _Share(nn.Module):
    """What must be on one rank, as one module for the planner. Ties between ranks are copies."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        for index, tensor in enumerate(tensors):
            empty = nn.Parameter(torch.empty_like(tensor), requires_grad=False)
            self.register_parameter(str(index), empty)


def _shares(chain: Chain) -> list[list[torch.Tensor]]:
    """The tensors of each block; the first and the last take what runs around the chain."""
    bare = chain.bare
    found = [_tensors(bare, [name]) for name in chain.blocks]
    inside = {id(tensor) for tensors in found for tensor in tensors}
    kept_by_first, kept_by_last = set(chain.before), set(chain.after)
    names = [name for name, _ in bare.named_modules()]
    middle = names.index(chain.container)
    for name in chain.unseen:
        (kept_by_first if names.index(name) < middle else kept_by_last).add(name)
    around = _tensors(bare, sorted(kept_by_first | kept_by_last))
    everywhere = [
        tensor
        for tensor in [*bare.parameters(), *bare.buffers()]
        if id(tensor) not in inside | {id(other) for other in around}
    ]
    found[0] = _distinct([*everywhere, *_tensors(bare, sorted(kept_by_first)), *found[0]])
    found[-1] = _distinct([*found[-1], *_tensors(bare, sorted(kept_by_last))])
    return found


def _tensors(bare: nn.Module, names: Sequence[str]) -> list[torch.Tensor]:
    modules = [bare.get_submodule(name) for name in names]
    return _distinct([t for m in modules for t in (*m.parameters(), *m.buffers())])


def _distinct(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())


def _place(shares: Sequence[Sequence[torch.Tensor]], room: Sequence[int]) -> list[int]:
    """The rank of each share, by the planner: ranks take the place of accelerators."""
    model = nn.ModuleList(_Share(tensors) for tensors in shares)
    budgets: dict[Any, int | str] = {rank: size for rank, size in enumerate(room) if size}
    if not budgets:
        raise DoesNotFitError("no process may hold anything")
    options = PlacementOptions(
        {**budgets, CPU.type: 0},
        no_split_module_classes=[_Share.__name__],
        disk=False,
        pretended=True,
    )
    placement = resolve_device_map(model, "balanced", options)
    ranks = {p.name: int(placement.shares[p.device].key) for p in placement.blocks}
    return [ranks[str(index)] for index in range(len(shares))]


def _nobody_idle(
    chain: Chain, ranks: Sequence[int], nbytes: Sequence[int], room: Sequence[int]
) -> list[int]:
    """How many blocks each rank has, at least one: an even share may be used up before the end.

    Raises:
        DoesNotFitError: a rank's memory is too small for the block that it would get.
    """
    size = len(room)
    counts = [ranks.count(rank) for rank in range(size)]
    for rank in range(size):
        if counts[rank] == 0:
            giver = _nearest_with_two(counts, rank)
            counts[giver] -= 1
            counts[rank] += 1
    start = 0
    for rank, count in enumerate(counts):
        need = sum(nbytes[start : start + count])
        if need > room[rank]:
            least = min(range(start, start + count), key=nbytes.__getitem__)
            raise DoesNotFitError(
                f"rank {rank} may hold {format_bytes(room[rank])}, which is too little for "
                f"{chain.blocks[least]}"
                + (f" and {count - 1} more blocks" if count > 1 else "")
                + f" ({format_bytes(need)}): each process needs one block at least. Raise its "
                "max_memory, or start fewer processes"
            )
        start += count
    return counts


def _nearest_with_two(counts: Sequence[int], rank: int) -> int:
    givers = [other for other, count in enumerate(counts) if count > 1]
    return min(givers, key=lambda other: (abs(other - rank), other))


def _stages(chain: Chain, counts: Sequence[int], nbytes: Sequence[int]) -> list[Stage]:
    stages, start = [], 0
    for rank, count in enumerate(counts):
        stop = start + count
        stages.append(
            Stage(
                rank,
                start,
                stop,
                sum(nbytes[start:stop]),
                is_first=rank == 0,
                is_last=rank == len(counts) - 1,
            )
        )
        start = stop
    return stages
