"""When a rank comes to a collective, and when it goes on."""

from __future__ import annotations

import random
import time
from typing import Any, Final

import torch
import torch.distributed as dist

__all__ = ["barrier", "completed"]

_BARRIERS: Final = 12


def barrier(backend: Any, device: torch.device, rank: int, world: int) -> Any:
    """When each rank enters barriers, and when it leaves them; in seconds."""
    # On one machine the monotonic clock is one for all processes.
    dice, times = random.Random(rank), []
    groups = [None, dist.new_group(range(world))]
    for turn in range(_BARRIERS):
        if rank == turn % world:
            time.sleep(dice.choice((0.01, 0.03)))
        entered, handle = time.monotonic(), turn % 3 == 0
        work = dist.barrier(groups[turn // world % 2], async_op=handle)
        if handle:
            work.wait()
        times.append([entered, time.monotonic()])
    return times


def completed(backend: Any, device: torch.device, rank: int, world: int) -> Any:
    """When each rank begins a collective, and when its handle says that it is completed."""
    times = []
    for turn in range(2 * world):
        tensor = torch.ones(3, device=device)
        backend.synchronize(device.index or 0)
        if rank == turn % world:
            time.sleep(0.03)
        begun = time.monotonic()
        work = dist.all_reduce(tensor, async_op=True) if turn < world else dist.barrier(None, True)
        while not work.is_completed() and time.monotonic() < begun + 1:  # it need not ever say so
            time.sleep(0.001)
        times.append([begun, time.monotonic()])
        work.wait()
    return times
