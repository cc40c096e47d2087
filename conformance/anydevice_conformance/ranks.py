"""One of the two processes of the checks of collectives. What it finds is judged by the checks."""

from __future__ import annotations

import datetime
import time
import traceback
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist

from anydevice_conformance import rank_laws, rank_training, rank_turns, rank_waits
from anydevice_conformance.rank_kind import named

__all__ = ["PARTS", "STEPS", "miss", "run_rank"]

_LIMIT: Final = datetime.timedelta(seconds=60)
#: Seconds after which a rank takes no further step, once one has failed: each may wait for so long
#: as a group waits, and the parent does not wait for all of them.
_PATIENCE: Final = 30


def miss(device_type: str, rank: int, world: int, store: str, index: int) -> dict[str, Any]:
    """Join the group; then rank 0 makes a collective that no other makes."""
    from anydevice import registry
    from anydevice.processes import collective_backends

    backend = registry.get_backend(device_type)
    backend.device_count()
    device = torch.device("cpu") if device_type == "cpu" else torch.device(device_type, index)
    # Ranks on a busy machine start seconds apart: what is short is the limit of a group of its own.
    _join(collective_backends(backend), backend, device, rank, world, store, 4 * _LIMIT)
    group = dist.new_group(timeout=datetime.timedelta(seconds=6))
    dist.all_reduce(torch.ones(1, device=device), group=group)
    backend.synchronize(index)
    if rank != 0:
        time.sleep(60)  # lives on, and does not come; it is killed when rank 0 has ended
        return {}
    start = time.monotonic()
    try:
        tensor = torch.ones(1, device=device)
        dist.all_reduce(tensor, group=group)
        tensor.cpu()
    except Exception as error:  # noqa: BLE001 - reported
        return {"error": _words(error), "seconds": time.monotonic() - start}
    return {"error": "", "seconds": time.monotonic() - start}


def run_rank(
    device_type: str,
    rank: int,
    world: int,
    store: str,
    index: int,
    part: str = "steps",
    examples: int = 0,
    seed: int = 0,
    room: int = 0,
    turns: int = 0,
    infers: bool = True,
) -> dict[str, Any]:
    """Join the group and take each step; an exception of a step is part of the answer.

    Args:
        device_type: whose collectives.
        rank: this process's number.
        world: how many processes there are.
        store: a file that the processes find each other by.
        index: this process's device.
        part: which steps to take, a key of `PARTS`.
        examples: how many generated collectives to do after them.
        seed: of these.
        room: bytes that a rank has for them on its device.
        turns: how many turns of generated programs to take after these.
        infers: whether the device works in inference mode.
    """
    from anydevice import registry
    from anydevice.processes import collective_backends

    torch.set_num_threads(1)
    backend = registry.get_backend(device_type)
    backend.device_count()
    device = torch.device("cpu") if device_type == "cpu" else torch.device(device_type, index)
    found: dict[str, Any] = {}
    try:
        names = collective_backends(backend)
        _join(names, backend, device, rank, world, store)
    except Exception as error:  # noqa: BLE001 - reported
        return {"start": _words(error)}
    begin, failed = time.monotonic(), ""
    for name, step in PARTS[part].items():
        if failed and time.monotonic() - begin > _PATIENCE:  # the ranks wait for each other
            found[name] = f"not tried, after {failed}"
            continue
        try:
            found[name] = step(backend, device, rank, world)
        except Exception as error:  # noqa: BLE001 - reported
            found[name] = _words(error)
            failed = failed or f"{name}: {found[name]}"
    if failed and time.monotonic() - begin > _PATIENCE:
        why = f"not tried, after {failed}"
        return {**found, "laws": {"COL-012": why}, "programs": {"COL-013": why}}
    if examples:
        found["laws"] = rank_laws.try_all(backend, device, rank, world, examples, seed, room)
    if turns:
        well = _all_well(store, rank, world, not found.get("laws"))
        found["programs"] = (
            rank_turns.try_programs(backend, device, rank, world, turns, seed, infers)
            if well
            else {"COL-013": "not tried, after another check of collectives failed"}
        )
    dist.destroy_process_group()
    return found


def _join(
    name: str,
    backend: Any,
    device: torch.device,
    rank: int,
    world: int,
    store: str,
    limit: datetime.timedelta = _LIMIT,
) -> None:
    if device.index is not None:
        backend.set_device(device.index)
    dist.init_process_group(
        name, init_method=f"file://{store}", rank=rank, world_size=world, timeout=limit
    )


def _all_well(store: str, rank: int, world: int, well: bool) -> bool:
    """Whether each rank is well; told without a collective, in which one could be missing."""
    told = named("FileStore")(f"{store}-well", world)
    told.set(str(rank), str(well))
    return all(told.get(str(other)) == b"True" for other in range(world))


def _words(error: BaseException) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error!s:.500} ({last.name})"


def _start(backend: Any, device: torch.device, rank: int, world: int) -> Any:
    tensor = torch.ones(1, device=device)
    dist.all_reduce(tensor)
    names = dict(pair.split(":") for pair in str(dist.get_backend_config()).split(","))
    return [names[device.type], dist.get_world_size(), tensor.cpu().item()]


def _all_reduce(backend: Any, device: torch.device, rank: int, world: int) -> Any:
    found = {}
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        if backend.supports_dtype(dtype):
            tensor = (torch.arange(100) % 11 + rank).to(dtype).to(device)
            dist.all_reduce(tensor)
            found[str(dtype)] = tensor.cpu().double().tolist()
    return found


def _broadcast(backend: Any, device: torch.device, rank: int, world: int) -> Any:
    values = torch.tensor([1.5, -0.0, float("inf"), 3e38]) if rank == 0 else torch.zeros(4)
    tensor = values.to(device)
    dist.broadcast(tensor, src=0)
    return [tensor.cpu().view(torch.int32).tolist(), tensor.device.type]


def _all_gather(backend: Any, device: torch.device, rank: int, world: int) -> Any:
    mine = torch.full((3,), float(rank + 1), device=device)
    pieces = [torch.zeros(3, device=device) for _ in range(world)]
    dist.all_gather(pieces, mine)
    return [piece.cpu().tolist() for piece in pieces]


def _handles(backend: Any, device: torch.device, rank: int, world: int) -> Any:
    """Several at once, waited for in another order on each rank."""
    tensors = [torch.full((5,), float(10**n * (rank + 1)), device=device) for n in range(4)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for n in range(4) if rank % 2 else reversed(range(4)):
        works[n].wait()
    return [tensor.cpu().tolist() for tensor in tensors]


def _ordered(backend: Any, device: torch.device, rank: int, world: int) -> Any:
    size = 256
    found = []
    for turn in range(3):
        if turn == 2 and rank == world - 1:
            time.sleep(0.4)  # the others wait for it, and miss nothing of its part
        identity = torch.eye(size, device=device)
        value = torch.full((size, size), float(rank + 1), device=device)
        for _ in range(30):
            value = torch.mm(value, identity)
        dist.all_reduce(value)
        value = value * 2
        found += [value.cpu().min().item(), value.cpu().max().item()]
    return found


def _reduce_scatter(backend: Any, device: torch.device, rank: int, world: int) -> Any:
    mine = torch.arange(3.0 * world, device=device) + rank
    part = torch.zeros(3, device=device)
    named("reduce_scatter_single", "reduce_scatter_tensor")(part, mine)
    return part.cpu().tolist()


def _gather_into(backend: Any, device: torch.device, rank: int, world: int) -> Any:
    found = {}
    for dtype in (torch.float32, torch.bfloat16, torch.bool):
        if backend.supports_dtype(dtype):
            mine = (torch.arange(3) == rank).to(dtype).to(device)
            whole = torch.zeros(3 * world, dtype=dtype, device=device)
            named("all_gather_single", "all_gather_into_tensor")(whole, mine)
            found[str(dtype)] = whole.cpu().float().tolist()
    return found


def _send(backend: Any, device: torch.device, rank: int, world: int) -> Any:
    sent = torch.tensor([1.5, -0.0, float("-inf")]).to(device)
    if rank == 0:
        dist.send(sent, dst=world - 1)
        return []
    received = torch.zeros(3, device=device)
    dist.recv(received, src=0)
    return received.cpu().view(torch.int32).tolist()


def _host(backend: Any, device: torch.device, rank: int, world: int) -> Any:
    tensor = torch.full((2,), float(rank + 1))
    dist.all_reduce(tensor)
    objects: list[Any] = [None] * world
    dist.all_gather_object(objects, {"rank": rank})
    told: list[Any] = ["told", 7, "long" * 80_000] if rank == 0 else [None] * 3
    dist.broadcast_object_list(told, src=0)
    return [tensor.tolist(), objects, [*told[:2], len(str(told[2]))]]


#: Name to step: called with the backend, the device, the rank and the number of ranks.
STEPS: Final[dict[str, Callable[[Any, torch.device, int, int], Any]]] = {
    "start": _start,
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "barrier": rank_waits.barrier,
    "ordered": _ordered,
    "handles": _handles,
    "completed": rank_waits.completed,
    "reduce_scatter": _reduce_scatter,
    "gather_into": _gather_into,
    "send": _send,
    "host": _host,
}
_TRAINING: Final[dict[str, Callable[[Any, torch.device, int, int], Any]]] = {
    "ddp": rank_training.ddp,
    "sharded": rank_training.sharded,
    "checkpoint": rank_training.checkpoint,
    "resumed": rank_training.resumed,
}
#: Parts to steps; each part has processes of its own. A quick run starts processes once, for all.
PARTS: Final[dict[str, dict[str, Callable[[Any, torch.device, int, int], Any]]]] = {
    "steps": STEPS,
    "laws": {},
    "training": _TRAINING,
    "all": {**STEPS, **_TRAINING},
}
