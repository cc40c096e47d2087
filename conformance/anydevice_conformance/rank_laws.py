"""Generated collectives in each of the processes: all do the same ones, and judge them."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import time
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist

from anydevice_conformance.data import same_bits, short_name

__all__ = ["Collective", "collectives", "try_all"]

#: Odd ones, ones next to powers of two, and one above 4 MiB in every dtype of 4 bytes.
_COUNTS: Final = (1, 2, 3, 7, 64, 65, 1000, 4096, 4097, 20_001, 65_537, 300_001, 1_048_583)
_SUMMED: Final = (torch.float32, torch.bfloat16, torch.int64)
_REDUCED: Final = (*_SUMMED, torch.float64, torch.float16, torch.int32)
_CARRIED: Final = (*_REDUCED, torch.uint8, torch.int8, torch.bool)
#: What a collective must leave alone, before and behind its tensors.
_MARGIN: Final = 5


@dataclasses.dataclass(frozen=True)
class Collective:
    """One generated collective.

    Attributes:
        kind: a key of `_KINDS`.
        dtype: of its tensors.
        count: elements of a rank's tensor.
        offset: elements before it in its storage.
        side_stream: whether it is called on another stream than the default one.
        slow: the rank that comes late; None for none.
        twice: whether it is called twice in a row on the same memory.
        waited: whether it is started with ``async_op`` and waited for.
        seed: of the values.
    """

    kind: str
    dtype: torch.dtype
    count: int
    offset: int
    side_stream: bool
    slow: int | None
    twice: bool
    waited: bool
    seed: int

    def __repr__(self) -> str:
        words = [f"{self.kind} of {self.count} {short_name(self.dtype)}"]
        if self.offset:
            words.append(f"{self.offset} elements into its storage")
        if self.side_stream:
            words.append("on a side stream")
        if self.slow is not None:
            words.append(f"rank {self.slow} comes late")
        if self.twice:
            words.append("twice in a row")
        if self.waited:
            words.append("with async_op")
        return f"<{', '.join(words)}>"


@dataclasses.dataclass(frozen=True)
class _Kind:
    """A kind of collective.

    Attributes:
        paragraph: the id of what it follows.
        dtypes: that it must take.
        call: does it; returns what ``async_op`` gives, and the result.
        expected: the result of a rank, of what all ranks had.
    """

    paragraph: str
    dtypes: tuple[torch.dtype, ...]
    call: Callable[[torch.Tensor, int, int, bool], tuple[Any, torch.Tensor]]
    expected: Callable[[list[torch.Tensor], int], torch.Tensor]
    summed: bool = False


def collectives(supports: Callable[[torch.dtype], bool], count: int, seed: int) -> list[Collective]:
    """So many collectives, each kind in turn; the same ones for the same seed."""
    dice = random.Random(seed)
    names = list(_KINDS)

    def one(number: int) -> Collective:
        kind = names[number % len(names)]
        return Collective(
            kind=kind,
            dtype=dice.choice([d for d in _KINDS[kind].dtypes if supports(d)]),
            count=dice.choice(_COUNTS),
            offset=dice.choice((0, 0, 1, 3, 8)),
            side_stream=dice.random() < 0.4,
            slow=dice.choice((None, None, 0, 1)),
            twice=dice.random() < 0.4,
            waited=dice.random() < 0.3 and kind != "send",
            seed=dice.randrange(1 << 30),
        )

    return [one(number) for number in range(count)]


def try_all(
    backend: Any, device: torch.device, rank: int, world: int, count: int, seed: int
) -> dict[str, str]:
    """Do them all; returns by paragraph what went wrong with the smallest that did, or nothing.

    An exception ends it: the ranks are no longer in step.
    """
    failed: dict[str, tuple[int, str]] = {}
    stream = None
    if device.type != "cpu" and backend.capabilities.streams:
        stream = backend.new_stream(device.index)
    for collective in collectives(backend.supports_dtype, count, seed):
        paragraph = _KINDS[collective.kind].paragraph
        try:
            wrong = _try(backend, device, stream, rank, world, collective)
        except Exception as error:  # noqa: BLE001 - reported
            failed[paragraph] = (0, f"{type(error).__name__}: {error!s:.300}\n{_shown(collective)}")
            break
        if wrong and failed.get(paragraph, (collective.count + 1, ""))[0] > collective.count:
            failed[paragraph] = (collective.count, f"{wrong}\n{_shown(collective)}")
    return {paragraph: text for paragraph, (_, text) in failed.items()}


def _shown(collective: Collective) -> str:
    return f"counterexample: {collective!r}"


def _try(
    backend: Any, device: torch.device, stream: Any, rank: int, world: int, collective: Collective
) -> str:
    kind = _KINDS[collective.kind]
    rounds = 2 if collective.twice else 1
    inputs = [[_values(collective, r, n) for r in range(world)] for n in range(rounds)]
    if collective.slow == rank:
        time.sleep(0.01)
    on_side = collective.side_stream and stream is not None
    with backend.use_stream(stream) if on_side else contextlib.nullcontext():
        size = collective.offset + collective.count + _MARGIN
        storage = torch.zeros(size, dtype=collective.dtype).to(device)
        tensor = storage[collective.offset : collective.offset + collective.count]
        results = []
        for number in range(rounds):
            # Queued work makes the input, and the output is used by work queued next.
            tensor.copy_(inputs[number][rank].to(device).clone())
            work, result = kind.call(tensor, rank, world, collective.waited)
            if collective.waited and work is not None:
                work.wait()
            results.append(result.clone())
        found = [result.cpu() for result in results]
        around = torch.cat([storage[: collective.offset], storage[-_MARGIN:]]).cpu()
    for number, one in enumerate(found):
        wanted = kind.expected(inputs[number], rank)
        if not same_bits(one, wanted):
            return f"rank {rank} has {_difference(one, wanted)}"
    if around.any():
        return f"rank {rank}: memory next to the tensor was written to"
    return ""


def _values(collective: Collective, rank: int, number: int) -> torch.Tensor:
    """Values whose sums are exact; where they are only carried, random bits."""
    generator = torch.Generator().manual_seed(collective.seed + 7 * rank + number)
    dtype, count = collective.dtype, collective.count
    if dtype is torch.bool:
        return torch.rand(count, generator=generator) > 0.5
    if not _KINDS[collective.kind].summed:
        bits = torch.randint(
            0, 256, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8
        )
        return bits.view(dtype)
    high = {torch.int64: 1 << 61, torch.float32: 1 << 22, torch.float64: 1 << 50}.get(dtype, 100)
    return torch.randint(-high, high, (count,), generator=generator).to(dtype)


def _difference(found: torch.Tensor, wanted: torch.Tensor) -> str:
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return f"{found.dtype} {tuple(found.shape)} for {wanted.dtype} {tuple(wanted.shape)}"
    bits = [t.contiguous().view(torch.uint8).view(t.numel(), -1) for t in (found, wanted)]
    places = (bits[0] != bits[1]).any(1).nonzero().flatten().tolist()
    first = places[0]
    return (
        f"{len(places)} wrong of {wanted.numel()}; at {first} {found[first].item()} "
        f"for {wanted[first].item()}"
    )


# ---------------------------------------------------------------------- the kinds


def _named(*names: str) -> Any:
    """The first function that torch.distributed has: newer versions have newer names."""
    return next(getattr(dist, name) for name in names if hasattr(dist, name))


def _reduce(operation: Any) -> Callable[[torch.Tensor, int, int, bool], tuple[Any, torch.Tensor]]:
    def call(tensor: torch.Tensor, rank: int, world: int, waited: bool) -> Any:
        return dist.all_reduce(tensor, op=operation, async_op=waited), tensor

    return call


def _broadcast(source: int) -> Callable[[torch.Tensor, int, int, bool], tuple[Any, torch.Tensor]]:
    def call(tensor: torch.Tensor, rank: int, world: int, waited: bool) -> Any:
        return dist.broadcast(tensor, src=source % world, async_op=waited), tensor

    return call


def _gather(tensor: torch.Tensor, rank: int, world: int, waited: bool) -> Any:
    pieces = [torch.zeros_like(tensor) for _ in range(world)]
    work = dist.all_gather(pieces, tensor, async_op=waited)
    if work is not None:
        work.wait()
    return None, torch.cat(pieces)


def _gather_into(tensor: torch.Tensor, rank: int, world: int, waited: bool) -> Any:
    whole = torch.zeros(tensor.numel() * world, dtype=tensor.dtype, device=tensor.device)
    gather = _named("all_gather_single", "all_gather_into_tensor")
    return gather(whole, tensor, async_op=waited), whole


def _scatter(tensor: torch.Tensor, rank: int, world: int, waited: bool) -> Any:
    whole = torch.cat([tensor + r for r in range(world)])
    part = torch.zeros_like(tensor)
    scatter = _named("reduce_scatter_single", "reduce_scatter_tensor")
    return scatter(part, whole, async_op=waited), part


def _send(tensor: torch.Tensor, rank: int, world: int, waited: bool) -> Any:
    if rank == 0:
        dist.send(tensor, dst=world - 1)
    elif rank == world - 1:
        dist.recv(tensor, src=0)
    return None, tensor


def _summed(all_: list[torch.Tensor], rank: int) -> torch.Tensor:
    return torch.stack(all_).sum(0, dtype=all_[0].dtype)


#: Name to kind.
_KINDS: Final = {
    "all_reduce": _Kind("COL-002", _SUMMED, _reduce(dist.ReduceOp.SUM), _summed, summed=True),
    "broadcast": _Kind("COL-003", _CARRIED, _broadcast(0), lambda all_, rank: all_[0]),
    "all_gather": _Kind("COL-004", _CARRIED, _gather, lambda all_, rank: torch.cat(all_)),
    "reduce_scatter": _Kind(
        "COL-007",
        (torch.float32, torch.bfloat16),
        _scatter,
        lambda all_, rank: _summed([one + rank for one in all_], rank),
        summed=True,
    ),
    "all_gather_into_tensor": _Kind(
        "COL-008", _CARRIED, _gather_into, lambda all_, rank: torch.cat(all_)
    ),
    "send": _Kind("COL-009", _CARRIED, _send, lambda all_, rank: all_[0]),
    "all_reduce, maximum": _Kind(
        "COL-012",
        _REDUCED,
        _reduce(dist.ReduceOp.MAX),
        lambda all_, rank: torch.stack(all_).amax(0),
        summed=True,
    ),
    "all_reduce, minimum": _Kind(
        "COL-012",
        _REDUCED,
        _reduce(dist.ReduceOp.MIN),
        lambda all_, rank: torch.stack(all_).amin(0),
        summed=True,
    ),
    "all_reduce of other dtypes": _Kind(
        "COL-012",
        (torch.float64, torch.float16, torch.int32),
        _reduce(dist.ReduceOp.SUM),
        _summed,
        summed=True,
    ),
    "broadcast from the last": _Kind(
        "COL-012", _CARRIED, _broadcast(-1), lambda all_, rank: all_[-1]
    ),
}
